import doctest
from importlib import import_module

import pytest


MODULES = (
    "configuration_vanilla_transformer",
    "tokenization_vanilla_transformer",
    "pipeline_vanilla_transformer",
    "evaluation",
    "translation.custom_generate",
    "translation.translator",
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_give_what_they_show(name):
    module = import_module(f"vanilla_transformer.{name}")
    examples = [example for test in doctest.DocTestFinder().find(module) for example in test.examples]
    assert examples
    skipped = [example for example in examples if example.options.get(doctest.SKIP)]
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted == len(examples) - len(skipped)
