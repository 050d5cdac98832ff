//! Elements of all types with small values, which every type holds exactly.

use hostccl_reduce::{DataType, ReduceOp};

/// Returns the bytes of a small number that the type holds exactly.
pub fn encode(dtype: DataType, value: f64) -> Vec<u8> {
    let bits = (value as f32).to_bits();
    // The exponent with another bias, and the upper bits of the mantissa.
    let small = |bias: u32, mantissa: u32| match value {
        0.0 => 0,
        _ => (((bits >> 23) - 127 + bias) << mantissa) | ((bits & 0x7f_ffff) >> (23 - mantissa)),
    };
    match dtype {
        DataType::Int8 => (value as i64 as i8).to_ne_bytes().into(),
        DataType::Uint8 => (value as i64 as u8).to_ne_bytes().into(),
        DataType::Int32 => (value as i32).to_ne_bytes().into(),
        DataType::Uint32 => (value as u32).to_ne_bytes().into(),
        DataType::Int64 => (value as i64).to_ne_bytes().into(),
        DataType::Uint64 => (value as u64).to_ne_bytes().into(),
        DataType::Float16 => (small(15, 10) as u16).to_ne_bytes().into(),
        DataType::Bfloat16 => (small(127, 7) as u16).to_ne_bytes().into(),
        DataType::Float32 => (value as f32).to_ne_bytes().into(),
        DataType::Float64 => value.to_ne_bytes().into(),
        DataType::Float8E4M3 => vec![small(7, 3) as u8],
        DataType::Float8E5M2 => vec![small(15, 2) as u8],
    }
}

/// Returns the number that an element has.
fn decode(dtype: DataType, at: &[u8]) -> f64 {
    let small = |bits: u32, bias: i32, mantissa: u32| {
        let (exponent, fraction) = (bits >> mantissa, bits & ((1 << mantissa) - 1));
        match exponent {
            0 => f64::from(fraction) * 2_f64.powi(1 - bias - mantissa as i32),
            _ => (1.0 + f64::from(fraction) / f64::from(1 << mantissa)) * 2_f64.powi(exponent as i32 - bias),
        }
    };
    let two = || u32::from(u16::from_ne_bytes(at[..2].try_into().unwrap()));
    match dtype {
        DataType::Int8 => f64::from(at[0] as i8),
        DataType::Uint8 => f64::from(at[0]),
        DataType::Int32 => f64::from(i32::from_ne_bytes(at[..4].try_into().unwrap())),
        DataType::Uint32 => f64::from(u32::from_ne_bytes(at[..4].try_into().unwrap())),
        DataType::Int64 => i64::from_ne_bytes(at[..8].try_into().unwrap()) as f64,
        DataType::Uint64 => u64::from_ne_bytes(at[..8].try_into().unwrap()) as f64,
        DataType::Float16 => small(two(), 15, 10),
        DataType::Bfloat16 => small(two(), 127, 7),
        DataType::Float32 => f64::from(f32::from_ne_bytes(at[..4].try_into().unwrap())),
        DataType::Float64 => f64::from_ne_bytes(at[..8].try_into().unwrap()),
        DataType::Float8E4M3 => small(u32::from(at[0]), 7, 3),
        DataType::Float8E5M2 => small(u32::from(at[0]), 15, 2),
    }
}

/// The value of element `index` that rank `from` has for rank `to`.
fn value(from: usize, to: usize, index: usize, most: usize) -> f64 {
    (1 + (index * 7 + from * 3 + to + index / 251) % most) as f64
}

/// Returns `count` elements that rank `from` has for rank `to`.
pub fn encoded(dtype: DataType, from: usize, to: usize, count: usize, most: usize) -> Vec<u8> {
    let elements: Vec<Vec<u8>> = (0..=most).map(|number| encode(dtype, number as f64)).collect();
    (0..count).flat_map(|index| &elements[value(from, to, index, most) as usize]).copied().collect()
}

/// Returns the values of `count` elements that rank `from` has for rank `to`.
pub fn values(from: usize, to: usize, count: usize, most: usize) -> Vec<Option<f64>> {
    (0..count).map(|index| Some(value(from, to, index, most))).collect()
}

/// Returns `count` reduced elements that all ranks have for rank `to`. Each value is multiplied by
/// `factor` first.
pub fn reduced(
    dtype: DataType,
    op: ReduceOp,
    factor: f64,
    ranks: usize,
    to: usize,
    count: usize,
    most: usize,
) -> Vec<Option<f64>> {
    let one = |index: usize| {
        let values = (0..ranks).map(|rank| factor * value(rank, to, index, most));
        match op {
            ReduceOp::Sum => values.sum(),
            ReduceOp::Prod => values.product(),
            ReduceOp::Max => values.fold(0.0, f64::max),
            ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
            ReduceOp::Avg => {
                let mean = values.sum::<f64>() / ranks as f64;
                if is_float(dtype) { mean } else { mean.trunc() }
            }
        }
    };
    (0..count).map(|index| Some(one(index))).collect()
}

fn is_float(dtype: DataType) -> bool {
    use DataType::*;
    matches!(dtype, Float16 | Bfloat16 | Float32 | Float64 | Float8E4M3 | Float8E5M2)
}

/// Returns what is wrong with a result, or `None` where the result is right. Elements for which
/// nothing is expected must keep the byte `unset`. Where `unset` is `None`, they may have any
/// value.
pub fn complaint(
    dtype: DataType,
    got: &[u8],
    expected: &[Option<f64>],
    unset: Option<u8>,
    is_average: bool,
) -> Option<String> {
    let size = dtype.size();
    // Where no number of the type equals the average, the average is rounded.
    let error = match is_average && is_float(dtype) {
        true if size == 1 => 0.08,
        true => 0.01,
        false => 0.0,
    };
    for (index, (bytes, expected)) in got.chunks(size).zip(expected).enumerate() {
        let Some(expected) = *expected else {
            if unset.is_some_and(|unset| bytes.iter().any(|byte| *byte != unset)) {
                return Some(format!("element {index} between the blocks was written"));
            }
            continue;
        };
        let got = decode(dtype, bytes);
        let expected = if is_float(dtype) { expected } else { decode(dtype, &encode(dtype, expected)) };
        let is_right = (got - expected).abs() <= expected * error;
        if !is_right {
            return Some(format!("element {index} is {got} and not {expected}"));
        }
    }
    None
}
