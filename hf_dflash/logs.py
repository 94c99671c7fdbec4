"""Loggers that follow transformers' verbosity: `transformers.logging.set_verbosity_error()` silences us as well."""

import logging

from transformers.utils import logging as transformers_logging


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module. It keeps its own name, but drops what transformers' verbosity would drop."""
    logger = transformers_logging.get_logger(name)
    logger.addFilter(_is_wanted)
    return logger


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= transformers_logging.get_verbosity()
