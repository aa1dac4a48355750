"""The stages: each reads files, calls the layers below, writes files. One file a stage, one function a file that
matters.
"""
