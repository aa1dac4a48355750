"""The process that a stage runs in: environment, output, ranks, devices, cost, caches, imports."""
