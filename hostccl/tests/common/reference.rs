//! The expected results of the collectives, computed plainly: one element after the other, in the
//! order of the ranks.

use half::{bf16, f16};
use hostccl::types::{DataType, ReduceOp};

/// Returns a number in 0..2^64 that depends on all arguments.
fn hash(parts: [u64; 3]) -> u64 {
    parts.into_iter().fold(0x243f_6a88_85a3_08d3, |state, part| {
        let mixed = (state ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ mixed >> 32
    })
}

/// Returns `count` elements of one rank. Integers have any value, so that sums wrap. Floats are in
/// (-2, 2) and use all their digits, so that the last bits of a sum show its order. The 8-bit
/// floats have any finite value.
pub fn sample(dtype: DataType, salt: u64, rank: usize, count: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for i in 0..count as u64 {
        let random = hash([salt, rank as u64, i]);
        let float = (random >> 11) as f64 / (1u64 << 51) as f64 - 2.0;
        match dtype {
            DataType::Float16 => bytes.extend(f16::from_f64(float).to_ne_bytes()),
            DataType::Bfloat16 => bytes.extend(bf16::from_f64(float).to_ne_bytes()),
            DataType::Float32 => bytes.extend((float as f32).to_ne_bytes()),
            DataType::Float64 => bytes.extend(float.to_ne_bytes()),
            DataType::Float8E4M3 => bytes.push((random as u8 & 0x80) | ((random >> 8) as u8 % 0x7f)),
            DataType::Float8E5M2 => bytes.push((random as u8 & 0x80) | ((random >> 8) as u8 % 0x7c)),
            _ => bytes.extend_from_slice(&random.to_ne_bytes()[..dtype.size()]),
        }
    }
    bytes
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
    let value = |input: &Vec<u8>, at: usize| load(input[at..at + SIZE].try_into().unwrap());
    let mut result = Vec::with_capacity(inputs[0].len());
    for at in (0..inputs[0].len()).step_by(SIZE) {
        let (first, others) = inputs.split_first().unwrap();
        let total = others.iter().fold(value(first, at), |total, input| apply(total, value(input, at)));
        result.extend(store(total));
    }
    result
}
