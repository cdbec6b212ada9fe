"""All text: chat templates, tokens, and text back from tokens. Workers only see token ids.

input_processor.py     a prompt becomes token ids, on threads at which tenants take turns (fair_turns.py)
chat.py                chat templates; template_marks.py, template_turns.py: what some of them expect and write
template_process.py    renders them in a process of their own, which runs template_program.py
tokenizer.py           ids of text, and text of ids, one at a time
text_stream.py         the text of an answer as its tokens arrive; stop strings
"""
