"""The process of a stage: environment, output, progress, ranks, devices, cost, caches, slow imports."""
