"""The first hour on a GPU: what is predicted beside what is measured."""
