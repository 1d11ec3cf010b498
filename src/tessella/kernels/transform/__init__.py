"""Operations that move, cut, join or reinterpret elements."""
