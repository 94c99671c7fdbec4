"""`hf-dflash chat`: reads messages and commands from the terminal. The turns themselves are in `conversation`."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_dflash_cli import options, texts
from hf_dflash_cli.show import diagnostics, statistics_table

if TYPE_CHECKING:
    from hf_dflash_cli.conversation import Conversation

HELP = """\
/stats      metrics of the last answer
/block N    use blocks of N tokens from now on; /block alone: the draft's own
/reset      forget the conversation
/quit       leave (Ctrl-D does too; Ctrl-C stops an answer)"""


def chat(
    target: options.Target,
    draft: options.Draft,
    system: options.System = None,
    chat_template_kwargs: options.ChatTemplateKwargs = "{}",
    max_new_tokens: options.MaxNewTokens = 1024,
    block_size: options.BlockSize = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    quantization: options.Quantization = None,
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    stats: options.Stats = False,
) -> None:
    """Chat with the target, turn by turn.

    /help lists the commands; Ctrl-C stops an answer, not the program.
    """
    template = options.chat_template_arguments(chat_template_kwargs)
    if system is not None:
        texts.checked(system, "--system")

    import torch

    from hf_dflash.pair import sampling_arguments
    from hf_dflash_cli.conversation import Conversation
    from hf_dflash_cli.loading import load

    pair = load(
        target,
        draft,
        template,
        block_size,
        dtype=dtype,
        device_map=device_map,
        quantization=quantization,
        gguf_file=gguf_file,
        trust_remote_code=trust_remote_code,
    )
    if seed is not None:
        torch.manual_seed(seed)
    arguments = {
        "max_new_tokens": max_new_tokens,
        **sampling_arguments(temperature, top_p, top_k, min_p, repetition_penalty),
    }
    talk(Conversation(pair, arguments, system, block_size), always_stats=stats)


def talk(conversation: Conversation, always_stats: bool = False) -> None:
    """Read turns from standard input until it ends or /quit."""
    from hf_dflash.draft.errors import PromptError

    with suppress(ImportError):  # line editing and history in `input`, where available
        import_module("readline")
    texts.pass_undecodable_bytes()
    console = diagnostics()
    console.print("Type a message; /help lists the commands.", style="dim")
    while True:
        try:
            line = texts.checked(input("\n> ").removeprefix(texts.BOM).strip(), "The message was not sent")
        except PromptError as error:
            console.print(str(error), markup=False, soft_wrap=True)
            continue
        except KeyboardInterrupt:
            console.print("\nuse /quit or Ctrl-D to leave", style="dim")
            continue
        except EOFError:
            console.print()
            return
        command, *words = line.split() or [""]
        if command == "/quit":
            return
        if command.startswith("/"):
            console.print(run_command(conversation, command, words))
        elif command:
            conversation.answer(line)
            if always_stats:
                console.print(statistics_table(conversation.statistics))


def run_command(conversation: Conversation, command: str, words: list[str]) -> Any:
    """Run a command between turns and return what to print."""
    from hf_dflash.draft.errors import DFlashError

    if command == "/help":
        return HELP
    if command == "/reset":
        conversation.reset()
        return "Started a new conversation."
    if command == "/stats":
        statistics = conversation.statistics
        return statistics_table(statistics) if statistics is not None else "No answer yet."
    if command == "/block":
        try:
            conversation.set_block_size(int(words[0]) if words else None)
        except (ValueError, DFlashError) as error:
            return str(error) if isinstance(error, DFlashError) else "/block takes a number of tokens."
        return f"Blocks of {conversation.block_size} tokens from now on."
    return f"Unknown command {command}.\n{HELP}"
