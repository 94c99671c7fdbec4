"""One `generate` call with a draft, from the dispatch on `assistant_model=` to the finished text.

`loop` holds the rounds themselves; every other module owns one step of a round or one concern of the call.
"""
