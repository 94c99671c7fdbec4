"""`python -m hf_dflash` is the command `hf-dflash`."""

from hf_dflash_cli.app import main

if __name__ == "__main__":
    main()
