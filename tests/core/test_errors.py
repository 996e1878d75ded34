"""What goes wrong with a disk is reported in a sentence, wherever it is met."""

import errno
import os

import pytest

from paceline.core.errors import PacelineError, naming_full_disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EISDIR, errno.EEXIST])
def test_a_full_disk_and_what_is_in_the_way_are_named(number: int) -> None:
    with pytest.raises(PacelineError, match=r"^runs/x/recipe\.yaml: ") as caught, naming_full_disks():
        raise OSError(number, os.strerror(number), "runs/x/recipe.yaml")
    assert caught.value.exit_code == 1
    with pytest.raises(PacelineError, match=f"^{os.strerror(number)}; "), naming_full_disks():
        raise OSError(number, os.strerror(number))


def test_other_errors_are_none_of_a_disk() -> None:
    with pytest.raises(FileNotFoundError), naming_full_disks():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "x")
