"""Decoder layers written as code: the launches that a layer makes, read from transformers' module of it by rule."""
