from __future__ import annotations

import json
import logging
import struct
from pathlib import Path

import pytest
import torch
