"""The explorers' widget in a notebook. The one file here that needs more than Python's own library."""

from typing import Any

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as error:
    lacks = f"explorers in a notebook need {error.name}, which is not installed"
    raise ImportError(f"{lacks}; pip install 'llmpar[lab]'") from error

from llmpar.explore import page


class Widget(anywidget.AnyWidget):
    """The browser's side of an explorer: it sets ``state`` and reads ``answer``."""

    _esm = page.MODULE
    _css = page.STYLE
    doc = traitlets.Dict().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)

    def __init__(self, explorer):
        doc = explorer.document()
        super().__init__(doc=doc, state=dict(explorer.state), answer=doc["answer"])
        self.explorer = explorer
        self.observe(self._asked, "state")
        self.on_msg(self._message)

    def _asked(self, change: Any) -> None:
        self.explorer.take(change["new"])
        self.answer = self.explorer.answer(dict(change["new"]))

    def _message(self, _, message: Any, __) -> None:
        if not isinstance(message, dict):
            return
        if message.get("more") and (answer := self.explorer.more(dict(self.state))):
            self.answer = answer
        if message.get("export") == "html":
            self.send({"html": page.html(self.explorer, small=not page.runtime())})
