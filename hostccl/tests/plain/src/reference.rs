//! The expected results of the collectives, computed plainly: one element after the other, in the
//! order of the ranks.

use half::{bf16, f16};
use hostccl_reduce::{DataType, ReduceOp};

/// Returns a number in 0..2^64 that depends on both.
fn mix(state: u64, part: u64) -> u64 {
    let mixed = (state ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ mixed >> 32
}

/// Returns elements that `make` makes of their numbers.
fn made<const SIZE: usize>(count: usize, make: impl Fn(usize) -> [u8; SIZE]) -> Vec<u8> {
    (0..count).map(make).collect::<Vec<_>>().into_flattened()
}

/// Returns `count` elements of one rank. Integers have any value, so that sums wrap. Floats are in
/// (-2, 2) and use all their digits, so that the last bits of a sum show its order. The 8-bit
/// floats have any finite value.
pub fn sample(dtype: DataType, salt: u64, rank: usize, count: usize) -> Vec<u8> {
    let of_rank = mix(mix(0x243f_6a88_85a3_08d3, salt), rank as u64);
    let random = |at: usize| mix(of_rank, at as u64);
    let float = |at: usize| (random(at) >> 11) as f64 / (1u64 << 51) as f64 - 2.0;
    let small = |at: usize, most: u8| [(random(at) as u8 & 0x80) | ((random(at) >> 8) as u8 % most)];
    match dtype {
        DataType::Float16 => made(count, |at| f16::from_f64(float(at)).to_ne_bytes()),
        DataType::Bfloat16 => made(count, |at| bf16::from_f64(float(at)).to_ne_bytes()),
        DataType::Float32 => made(count, |at| (float(at) as f32).to_ne_bytes()),
        DataType::Float64 => made(count, |at| float(at).to_ne_bytes()),
        DataType::Float8E4M3 => made(count, |at| small(at, 0x7f)),
        DataType::Float8E5M2 => made(count, |at| small(at, 0x7c)),
        DataType::Int8 | DataType::Uint8 => made(count, |at| (random(at) as u8).to_ne_bytes()),
        DataType::Int32 | DataType::Uint32 => made(count, |at| (random(at) as u32).to_ne_bytes()),
        DataType::Int64 | DataType::Uint64 => made(count, |at| random(at).to_ne_bytes()),
    }
}

/// Reduces the inputs, element by element.
pub fn reduced(dtype: DataType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    if let [only] = inputs {
        return only.clone();
    }
    macro_rules! integers {
        ($type:ty) => {
            reduced_as(
                inputs,
                |bytes| i128::from(<$type>::from_ne_bytes(bytes)),
                |a, b| match op {
                    // The exact sum fits for any number of ranks that are tested.
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Prod => i128::from((a as $type).wrapping_mul(b as $type)),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
                },
                |sum| (if op == ReduceOp::Avg { sum / inputs.len() as i128 } else { sum } as $type).to_ne_bytes(),
            )
        };
    }
    macro_rules! floats {
        ($type:ty, $load:expr, $store:expr) => {
            reduced_as(
                inputs,
                $load,
                |a: $type, b: $type| match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Prod => a * b,
                    // The positive zero is larger than the negative one.
                    ReduceOp::Max => {
                        if a > b || a == b && a.is_sign_positive() {
                            a
                        } else {
                            b
                        }
                    }
                    ReduceOp::Min => {
                        if a < b || a == b && a.is_sign_negative() {
                            a
                        } else {
                            b
                        }
                    }
                },
                |sum| $store(if op == ReduceOp::Avg { sum / inputs.len() as $type } else { sum }),
            )
        };
    }
    match dtype {
        DataType::Int8 => integers!(i8),
        DataType::Uint8 => integers!(u8),
        DataType::Int32 => integers!(i32),
        DataType::Uint32 => integers!(u32),
        DataType::Int64 => integers!(i64),
        DataType::Uint64 => integers!(u64),
        DataType::Float32 => floats!(f32, f32::from_ne_bytes, f32::to_ne_bytes),
        DataType::Float64 => floats!(f64, f64::from_ne_bytes, f64::to_ne_bytes),
        DataType::Float16 => {
            floats!(f32, |bytes| f16::from_ne_bytes(bytes).to_f32(), |sum| f16::from_f32(sum).to_ne_bytes())
        }
        DataType::Bfloat16 => {
            floats!(f32, |bytes| bf16::from_ne_bytes(bytes).to_f32(), |sum| bf16::from_f32(sum).to_ne_bytes())
        }
        DataType::Float8E4M3 | DataType::Float8E5M2 => {
            let values: Vec<f32> = (0..=0x7f).map(|bits| float8_value(dtype, bits)).collect();
            let value = |[bits]: [u8; 1]| values[usize::from(bits & 0x7f)] * if bits < 0x80 { 1.0 } else { -1.0 };
            floats!(f32, value, |sum| [nearest_float8(&values, sum)])
        }
    }
}

/// The value of a finite 8-bit number without a sign.
fn float8_value(dtype: DataType, bits: u8) -> f32 {
    let (mantissa_bits, bias) = if dtype == DataType::Float8E4M3 { (3, 7) } else { (2, 15) };
    let (exponent, mantissa) = (i32::from(bits >> mantissa_bits), i32::from(bits & ((1 << mantissa_bits) - 1)));
    match (dtype, bits) {
        (DataType::Float8E4M3, 0x7f) | (DataType::Float8E5M2, 0x7c..) => f32::INFINITY,
        _ if exponent == 0 => mantissa as f32 * 2f32.powi(1 - mantissa_bits - bias),
        _ => (mantissa + (1 << mantissa_bits)) as f32 * 2f32.powi(exponent - mantissa_bits - bias),
    }
}

/// Rounds to nearest, ties to even, and not beyond the largest number. `values` are those of the
/// numbers without a sign.
fn nearest_float8(values: &[f32], value: f32) -> u8 {
    let magnitude = value.abs();
    let finite = values.partition_point(|known| known.is_finite());
    let above = values[..finite].partition_point(|known| *known <= magnitude);
    let below = above - 1;
    let up = above < finite && {
        let (down, up) = (magnitude - values[below], values[above] - magnitude);
        up < down || up == down && below % 2 == 1
    };
    (below + usize::from(up)) as u8 | if value.is_sign_negative() { 0x80 } else { 0 }
}

/// Reduces the inputs in an arithmetic that `load`, `apply` and `store` define.
fn reduced_as<T: Copy, const SIZE: usize>(
    inputs: &[Vec<u8>],
    load: impl Fn([u8; SIZE]) -> T,
    apply: impl Fn(T, T) -> T,
    store: impl Fn(T) -> [u8; SIZE],
) -> Vec<u8> {
    let inputs: Vec<&[[u8; SIZE]]> = inputs.iter().map(|input| elements(input)).collect();
    let (first, others) = (inputs[0], &inputs[1..]);
    made(first.len(), |at| store(others.iter().fold(load(first[at]), |total, other| apply(total, load(other[at])))))
}

/// Returns the bytes as elements of that size.
fn elements<const SIZE: usize>(bytes: &[u8]) -> &[[u8; SIZE]] {
    // SAFETY: the elements lie within the bytes, and have the alignment of bytes.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / SIZE) }
}
