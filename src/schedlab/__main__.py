"""`python -m schedlab …` is `schedlab …`."""

from schedlab.experiments.cli import main

if __name__ == "__main__":
    main()
