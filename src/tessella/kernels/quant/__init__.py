"""Between floating numbers and int8 or fp8: ``quantize`` and ``dequantize``."""
