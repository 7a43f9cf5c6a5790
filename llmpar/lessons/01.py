"""Exercises of lesson 01 that are computed: which inputs to keep."""

from llmpar.lessons import Exercise


def keep_every() -> Exercise:
    """Ask which inputs to keep: a function of the layers and of a layer's activations over its input."""

    def solution(layers, ratio):
        return min(range(1, layers + 1), key=lambda c: -(-layers // c) + c * ratio)

    wrong = dict(
        every_layer=lambda layers, ratio: 1,
        root_of_layers=lambda layers, ratio: round(layers**0.5),
        all_layers=lambda layers, ratio: layers,
        multiplied=lambda layers, ratio: max(1, round((layers * ratio) ** 0.5)),
        groups=lambda layers, ratio: -(-layers // solution(layers, ratio)),
        memory=lambda layers, ratio: min(-(-layers // c) + c * ratio for c in range(1, layers + 1)),
        not_whole=lambda layers, ratio: (layers / ratio) ** 0.5,
        rounded_down=lambda layers, ratio: max(1, int((layers / ratio) ** 0.5)),
        no_root=lambda layers, ratio: max(1, layers // ratio),
    )
    run = lambda function: [
        function(*given) for given in ((64, 17), (80, 5), (100, 1), (8, 17), (32, 6))
    ]
    return Exercise("expert", solution, wrong, run)
