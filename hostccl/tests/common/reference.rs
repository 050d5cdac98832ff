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
/// (-2, 2) and use all their digits, so that the last bits of a sum show its order.
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
                |bytes| <$type>::from_ne_bytes(bytes),
                |a, b| match op {
                    ReduceOp::Sum | ReduceOp::Avg => a.wrapping_add(b),
                    ReduceOp::Prod => a.wrapping_mul(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
                },
                |sum| {
                    if op == ReduceOp::Avg { (i128::from(sum) / inputs.len() as i128) as $type } else { sum }
                        .to_ne_bytes()
                },
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
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
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
    }
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
