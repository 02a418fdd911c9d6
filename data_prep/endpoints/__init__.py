"""Servers that answer questions over HTTP, by OpenAI's API as vLLM, SGLang and others speak it.

``http`` sends requests and sorts failures; ``routes`` says how a question is asked and what of the
reply can be trusted to the token; ``endpoint`` keeps one server's state; ``pool`` is the
:class:`data_prep.answering.AnswerEngine` over several of them.
"""
