package devicemesh

import "math"

// Float8E4M3 holds a number in 8 bits: 4 of exponent and 3 of mantissa, as ncclFloat8e4m3. It has
// no infinities; its largest number is 448.
type Float8E4M3 uint8

// Float8E5M2 holds a number in 8 bits: 5 of exponent and 2 of mantissa, as ncclFloat8e5m2. Its
// largest number is 57344.
type Float8E5M2 uint8

// ToFloat8E4M3 rounds to the nearest, ties to even. A value that is too large becomes the largest
// number, and so does an infinity, as in CUDA's conversion and in the host engine's sums.
func ToFloat8E4M3(value float32) Float8E4M3 {
	return Float8E4M3(toEighth(value, 3, 7, 448, 0x7e))
}

// Float32 is the same number.
func (f Float8E4M3) Float32() float32 {
	if f&0x7f == 0x7f {
		return float32(math.NaN())
	}
	return fromEighth(uint8(f), 3, 7)
}

// ToFloat8E5M2 rounds to the nearest, ties to even. A value that is too large becomes the largest
// number, and so does an infinity, as in CUDA's conversion and in the host engine's sums.
func ToFloat8E5M2(value float32) Float8E5M2 {
	return Float8E5M2(toEighth(value, 2, 15, 57344, 0x7b))
}

// Float32 is the same number.
func (f Float8E5M2) Float32() float32 {
	switch size := f & 0x7f; {
	case size > 0x7c:
		return float32(math.NaN())
	case size == 0x7c:
		return float32(math.Inf(1 - 2*int(f>>7)))
	}
	return fromEighth(uint8(f), 2, 15)
}

// toEighth rounds to the format with that many bits of mantissa, that bias, and that largest
// number, which has the bits top.
func toEighth(value float32, mantissa, bias int, largest float64, top uint8) uint8 {
	sign := uint8(math.Float32bits(value) >> 24 & 0x80)
	size := math.Abs(float64(value))
	switch {
	case value != value:
		return sign | 0x7f
	case size == 0:
		return sign
	}
	// Below the smallest normal number all numbers lie equally far apart.
	_, exponent := math.Frexp(size)
	exponent = max(exponent, 2-bias)
	units := math.RoundToEven(math.Ldexp(size, mantissa+1-exponent))
	if size = math.Ldexp(units, exponent-mantissa-1); size >= largest {
		return sign | top
	}
	// The units of a normal number have one bit more than the mantissa. That bit adds one to the
	// exponent, and so does a carry.
	return sign | (uint8(exponent-2+bias)<<mantissa + uint8(units))
}

// fromEighth gives the number in these bits, which are not those of an infinity or a NaN.
func fromEighth(bits uint8, mantissa, bias int) float32 {
	exponent, units := int(bits&0x7f)>>mantissa, int(bits)&(1<<mantissa-1)
	if exponent > 0 {
		units += 1 << mantissa
	}
	size := math.Ldexp(float64(units), max(exponent, 1)-bias-mantissa)
	return float32(math.Copysign(size, 1-2*float64(bits>>7)))
}
