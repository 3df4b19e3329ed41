"""``python -m gradsync.bench``, and the form in which torchrun starts it."""

from gradsync.bench.cli import main

if __name__ == "__main__":
    main()
