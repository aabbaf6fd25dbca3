cat > tests/test_calc.py <<'EOF'
import pytest
@pytest.mark.parametrize(("x", "expected"), [(1, 2), (2, 4)])
def test_twice(x, expected): pass
def test_twice_of_zero(): pass
def test_half(): pass
EOF
echo >> README.rst
