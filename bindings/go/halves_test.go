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

func TestEighths(t *testing.T) {
	for bits := range 1 << 8 {
		fine, wide := Float8E4M3(bits), Float8E5M2(bits)
		if value := fine.Float32(); value == value && ToFloat8E4M3(value) != fine {
			t.Errorf("float8 e4m3 %#x is %v, which is %#x", bits, value, ToFloat8E4M3(value))
		}
		if value := wide.Float32(); value == value && !math.IsInf(float64(value), 0) && ToFloat8E5M2(value) != wide {
			t.Errorf("float8 e5m2 %#x is %v, which is %#x", bits, value, ToFloat8E5M2(value))
		}
	}
	inf := float32(math.Inf(1))
	for _, each := range []struct {
		value float32
		fine  Float8E4M3
		wide  Float8E5M2
	}{
		{0, 0, 0}, {1, 0x38, 0x3c}, {-2, 0xc0, 0xc0}, {448, 0x7e, 0x5f}, {464, 0x7e, 0x5f}, {-1e9, 0xfe, 0xfb}, {57344, 0x7e, 0x7b}, {61440, 0x7e, 0x7b}, {inf, 0x7e, 0x7b},
		{1.0625, 0x38, 0x3c}, {1.1875, 0x3a, 0x3d}, {1.125, 0x39, 0x3c}, {1.375, 0x3b, 0x3e}, {1.9375, 0x40, 0x40},
		{0x1p-9, 1, 0x18}, {0x1p-10, 0, 0x14}, {0x1.8p-9, 2, 0x1a}, {0x1p-16, 0, 1}, {0x1p-17, 0, 0}, {0x1.8p-16, 0, 2}, {0x1.fp-7, 8, 0x24},
	} {
		if fine, wide := ToFloat8E4M3(each.value), ToFloat8E5M2(each.value); fine != each.fine || wide != each.wide {
			t.Errorf("%v is %#x and %#x, expected %#x and %#x", each.value, fine, wide, each.fine, each.wide)
		}
	}
	if top := Float8E5M2(0xfc).Float32(); !math.IsInf(float64(top), -1) {
		t.Error(top)
	}
	nan := float32(math.NaN())
	if fine, wide := ToFloat8E4M3(nan).Float32(), ToFloat8E5M2(nan).Float32(); fine == fine || wide == wide {
		t.Error(fine, wide)
	}
}
