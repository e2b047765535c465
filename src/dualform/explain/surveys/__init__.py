"""Scores of a network that was trained already: gradient similarity and EK-FAC, both approximations."""

from .answers import SurveyScores
from .scores import Method, survey_scores

__all__ = ["Method", "SurveyScores", "survey_scores"]
