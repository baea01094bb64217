"""docs/commands.md: every command with its own words, from the command line itself."""

from __future__ import annotations

import inspect
import re

import click

from docs.data.pages import table
from factory.cli import cli

__all__ = ["blocks"]


def blocks() -> dict[str, str]:
    """One block: a section for each command and each of its subcommands."""
    context = click.Context(cli, info_name="factory")
    parts = []
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        parts += _section(command, name, context, "##")
        if isinstance(command, click.Group):
            inside = click.Context(command, info_name=name, parent=context)
            for sub in command.list_commands(inside):
                found = command.get_command(inside, sub)
                assert found is not None
                parts += _section(found, sub, inside, "###")
    return {"commands": "\n\n".join(parts)}


def _section(command: click.Command, name: str, parent: click.Context, level: str) -> list[str]:
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [
        f"{level} {context.command_path}",
        f"```\n{context.command_path} {usage}\n```",
        _words(command.help or ""),
    ]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    if options:
        parts.append(table("option | does", ([_option(o), _help(o)] for o in options)))
    return parts


def _words(text: str) -> str:
    """Help as Markdown; what click is told not to wrap are examples."""
    found = []
    for part in inspect.cleandoc(text).split("\n\n"):
        if part.startswith("\b\n"):
            found.append("```\n" + part.removeprefix("\b\n") + "\n```")
        else:
            found.append(_escaped(" ".join(part.split())))
    return "\n\n".join(found)


def _escaped(text: str) -> str:
    return re.sub(r"([<>*|])", r"\\\1", text)


def _option(option: click.Option) -> str:
    value = ""
    if not option.is_flag:
        usual = "NAME" if _choices(option) else option.type.name.upper()
        value = f" {option.metavar or usual}"
    return ", ".join(f"`{o}{value}`" for o in option.opts)


def _choices(option: click.Option) -> list[str]:
    return [f"`{choice}`" for choice in getattr(option.type, "choices", ())]


def _help(option: click.Option) -> str:
    text = _escaped(" ".join((option.help or "").split()))
    if choices := _choices(option):
        text += f" One of {', '.join(choices)}."
    default = option.default
    if option.show_default and isinstance(default, str | int | float) and default not in ("", 0):
        text += f" Default: `{default}`."
    return text
