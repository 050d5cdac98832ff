package devicemesh

import (
	"math"
	"testing"
)

func TestHalves(t *testing.T) {
	for bits := range 1 << 16 {
		half, brain := Float16(bits), BFloat16(bits)
		if value := half.Float32(); value == value && ToFloat16(value) != half {
			t.Fatalf("float16 %#x is %v, which is %#x", bits, value, ToFloat16(value))
		}
		if value := brain.Float32(); value == value && ToBFloat16(value) != brain {
			t.Fatalf("bfloat16 %#x is %v, which is %#x", bits, value, ToBFloat16(value))
		}
	}
	inf := float32(math.Inf(1))
	for _, each := range []struct {
		value float32
		half  Float16
		brain BFloat16
	}{
		{1, 0x3c00, 0x3f80}, {-2, 0xc000, 0xc000}, {65504, 0x7bff, 0x4780}, {65519.996, 0x7bff, 0x4780}, {65520, 0x7c00, 0x4780}, {inf, 0x7c00, 0x7f80},
		{0x1p-24, 1, 0x3380}, {0x1p-25, 0, 0x3300}, {0x1.8p-24, 2, 0x33c0}, {1 + 0x1p-11, 0x3c00, 0x3f80}, {1 + 0x3p-11, 0x3c02, 0x3f80},
		{1 + 0x1p-8, 0x3c04, 0x3f80}, {1 + 0x3p-8, 0x3c0c, 0x3f82}, {2 - 0x1p-20, 0x4000, 0x4000},
	} {
		if half, brain := ToFloat16(each.value), ToBFloat16(each.value); half != each.half || brain != each.brain {
			t.Errorf("%v is %#x and %#x, expected %#x and %#x", each.value, half, brain, each.half, each.brain)
		}
	}
	nan := float32(math.NaN())
	if half, brain := ToFloat16(nan).Float32(), ToBFloat16(nan).Float32(); half == half || brain == brain {
		t.Error(half, brain)
	}
}
