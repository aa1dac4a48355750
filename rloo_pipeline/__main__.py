"""`python -m rloo_pipeline STAGE …` is `rloo STAGE …`."""

from rloo_pipeline.cli import main

if __name__ == "__main__":
    main()
