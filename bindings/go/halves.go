package devicemesh

import "math"

// Float16 holds the bits of an IEEE 754 binary16.
type Float16 uint16

// BFloat16 holds the upper 16 bits of a float32.
type BFloat16 uint16

// ToBFloat16 rounds to the nearest, ties to even.
func ToBFloat16(value float32) BFloat16 {
	bits := math.Float32bits(value)
	if value != value {
		return BFloat16(bits>>16 | 0x40)
	}
	return BFloat16((bits + 0x7fff + bits>>16&1) >> 16)
}

// Float32 is the same number.
func (f BFloat16) Float32() float32 {
	return math.Float32frombits(uint32(f) << 16)
}

// ToFloat16 rounds to the nearest, ties to even. A value that is too large becomes an infinity.
func ToFloat16(value float32) Float16 {
	bits := math.Float32bits(value)
	sign := Float16(bits >> 16 & 0x8000)
	size := math.Abs(float64(value))
	switch {
	case value != value:
		return sign | 0x7e00
	case size >= 65520:
		return sign | 0x7c00
	case size < 0x1p-14:
		// Subnormal numbers are multiples of 2^-24. The largest value here rounds up to the
		// smallest normal number.
		return sign | Float16(math.RoundToEven(size*0x1p24))
	}
	fraction, exponent := math.Frexp(size)
	// The fraction has 2^10 to 2^11 units of the last place. 2^11 carries into the exponent.
	units := Float16(math.RoundToEven(fraction * 0x1p11))
	return sign | (Float16(exponent+14)<<10 + units - 0x400)
}

// Float32 is the same number.
func (f Float16) Float32() float32 {
	sign, exponent, fraction := uint32(f&0x8000)<<16, f>>10&0x1f, float64(f&0x3ff)
	var size float64
	switch exponent {
	case 0:
		size = fraction * 0x1p-24
	case 31:
		return math.Float32frombits(sign | 0x7f800000 | uint32(f&0x3ff)<<13)
	default:
		size = math.Ldexp(fraction+0x400, int(exponent)-25)
	}
	return math.Float32frombits(sign | math.Float32bits(float32(size)))
}
