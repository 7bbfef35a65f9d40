"""`python -m hetrun` is the `hetrun` command."""

from hetrun.cli import main

if __name__ == "__main__":
    main()
