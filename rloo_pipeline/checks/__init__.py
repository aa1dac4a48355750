"""What policy 0 must be able to do before rounds are paid for: small functions from evidence to one number each.

`registry` says what a check is, `evidence` what they see; `tokens`, `engines`, `samples` and `groups` have the checks;
`mixing` has the mathematics of groups that teach. `verdicts` holds each number against its limits in the configuration.
Nothing here reads a file or loads a model: stages/checks.py gathers the evidence.
"""
