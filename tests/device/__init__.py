import pytest

pytest.register_assert_rewrite("tests.device.devices", "tests.device.trainings")
