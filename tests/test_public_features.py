"""Every public feature is named by a test."""

from helpers.pages.public_features import features, files_naming


def test_every_public_feature_is_named_by_a_test() -> None:
    known = list(features())
    assert len({feature for feature, _ in known}) == len(known) > 200
    lacking = [feature for feature, pattern in known if not any(files_naming(feature, pattern))]
    assert lacking == []


def test_a_feature_that_no_test_names_is_found() -> None:
    """The spelling is put together here: this file is searched, too."""
    unknown = "un" + "heard"
    for pattern in (rf"\b{unknown}=", rf"--{unknown}\b", rf"[.]{unknown}[(]"):
        assert not any(files_naming(unknown, pattern))
