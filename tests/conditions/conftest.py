import pytest
from users import User


@pytest.fixture
def user(tmp_path):
    """A user with a home folder, a working directory and nothing else."""
    return User(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A user who has trained with one process, in ordinary circumstances."""
    user = User(tmp_path_factory.mktemp("trained"))
    user.train()
    return user


@pytest.fixture(scope="session")
def translations(trained):
    """Digest of the test set's translations in ordinary circumstances."""
    return trained.translate_file(trained.file(""))
