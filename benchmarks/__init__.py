"""What a push costs, and what it is compared with: ``python -m benchmarks.run``, see ``docs/benchmarks/README.md``."""
