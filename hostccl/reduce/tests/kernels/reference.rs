//! The plain reference: what each reduction of one element gives, and the numbers to reduce.

use half::{bf16, f16};

use hostccl_reduce::{DataType, ReduceOp};

/// Reduces one element of each input, in the arithmetic of its own type.
fn reference(dtype: DataType, op: ReduceOp, values: &[[u8; 8]]) -> Vec<u8> {
    macro_rules! integer {
        ($type:ty) => {{
            let mut all = values.iter().map(|v| <$type>::from_ne_bytes(v[..size_of::<$type>()].try_into().unwrap()));
            let first = all.next().unwrap();
            let result = match op {
                ReduceOp::Sum => all.fold(first, <$type>::wrapping_add),
                ReduceOp::Prod => all.fold(first, <$type>::wrapping_mul),
                ReduceOp::Max => all.fold(first, |a, b| if b > a { b } else { a }),
                ReduceOp::Min => all.fold(first, |a, b| if b < a { b } else { a }),
                ReduceOp::Avg => {
                    (all.fold(i128::from(first), |a, b| a + i128::from(b)) / values.len() as i128) as $type
                }
            };
            result.to_ne_bytes().to_vec()
        }};
    }
    macro_rules! float {
        ($values:expr, $type:ty) => {{
            let mut all = $values;
            let first: $type = all.next().unwrap();
            // A NaN wins over a number. The positive zero is larger than the negative one.
            let above = |a: $type, b: $type| a > b || a.is_nan() || (a == b && a.is_sign_positive());
            let below = |a: $type, b: $type| a < b || a.is_nan() || (a == b && a.is_sign_negative());
            match op {
                ReduceOp::Sum => all.fold(first, |a, b| a + b),
                ReduceOp::Prod => all.fold(first, |a, b| a * b),
                ReduceOp::Max => all.fold(first, |a, b| if above(a, b) { a } else { b }),
                ReduceOp::Min => all.fold(first, |a, b| if below(a, b) { a } else { b }),
                ReduceOp::Avg => {
                    let (all, n) = (all.collect::<Vec<$type>>(), values.len() as $type);
                    let plain = all.iter().fold(first, |a, b| a + b);
                    // Where the sum overflows, the values are scaled down first.
                    let halved = |scale: $type| all.iter().fold(first / scale, |a, b| a + b / scale) / n * scale;
                    if plain.is_finite() { plain / n } else { halved(values.len().next_power_of_two() as $type) }
                }
            }
        }};
    }
    let small = |v: &[u8; 8]| float8_value(dtype, v[0]);
    let keeps = matches!(op, ReduceOp::Max | ReduceOp::Min);
    let half = |v: &[u8; 8]| u16::from_ne_bytes([v[0], v[1]]);
    match dtype {
        DataType::Int8 => integer!(i8),
        DataType::Uint8 => integer!(u8),
        DataType::Int32 => integer!(i32),
        DataType::Uint32 => integer!(u32),
        DataType::Int64 => integer!(i64),
        DataType::Uint64 => integer!(u64),
        DataType::Float32 => {
            float!(values.iter().map(|v| f32::from_ne_bytes(v[..4].try_into().unwrap())), f32).to_ne_bytes().to_vec()
        }
        DataType::Float64 => float!(values.iter().map(|v| f64::from_ne_bytes(*v)), f64).to_ne_bytes().to_vec(),
        DataType::Float16 => {
            let result = float!(values.iter().map(|v| f16::from_bits(half(v)).to_f32_const()), f32);
            f16::from_f32_const(result).to_ne_bytes().to_vec()
        }
        DataType::Bfloat16 => {
            let result = float!(values.iter().map(|v| bf16::from_bits(half(v)).to_f32()), f32);
            bf16::from_f32(result).to_ne_bytes().to_vec()
        }
        DataType::Float8E4M3 | DataType::Float8E5M2 => {
            vec![nearest_float8(dtype, float!(values.iter().map(small), f32), keeps)]
        }
    }
}

/// Returns the value of an 8-bit number. It follows the definition of the two formats.
fn float8_value(dtype: DataType, bits: u8) -> f32 {
    let (mantissa_bits, bias) = if dtype == DataType::Float8E4M3 { (3, 7) } else { (2, 15) };
    let (exponent, mantissa) =
        (i32::from((bits & 0x7f) >> mantissa_bits), i32::from(bits & ((1 << mantissa_bits) - 1)));
    let unit = |power: i32| 2f32.powi(power - mantissa_bits - bias);
    let magnitude = match (dtype, bits & 0x7f) {
        (DataType::Float8E4M3, 0x7f) | (DataType::Float8E5M2, 0x7d..) => f32::NAN,
        (DataType::Float8E5M2, 0x7c) => f32::INFINITY,
        _ if exponent == 0 => mantissa as f32 * unit(1),
        _ => (mantissa + (1 << mantissa_bits)) as f32 * unit(exponent),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Tries all 8-bit numbers, and returns the number that is nearest to a value. Where two numbers
/// are equally near, this function returns the even one.
fn nearest_float8(dtype: DataType, value: f32, keeps_infinity: bool) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    if value.is_infinite() && keeps_infinity {
        return sign | 0x7c;
    }
    let largest = if dtype == DataType::Float8E4M3 { 0x7e } else { 0x7b };
    let far = |bits: u8| (f64::from(float8_value(dtype, bits)) - f64::from(value.abs()).min(1e6)).abs();
    let nearest = (0..=largest).min_by(|a, b| far(*a).total_cmp(&far(*b)).then((a & 1).cmp(&(b & 1))));
    sign | nearest.unwrap()
}

pub(super) fn is_nan(dtype: DataType, bytes: &[u8]) -> bool {
    match dtype {
        DataType::Float16 => f16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Bfloat16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Float32 => f32::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Float64 => f64::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Float8E4M3 | DataType::Float8E5M2 => float8_value(dtype, bytes[0]).is_nan(),
        _ => false,
    }
}

/// Expects equal bits, except that any NaN equals any other.
pub(super) fn assert_elements(dtype: DataType, context: &str, actual: &[u8], expected: &[u8]) {
    assert_eq!(actual.len(), expected.len());
    for (i, (a, e)) in actual.chunks(dtype.size()).zip(expected.chunks(dtype.size())).enumerate() {
        assert!(a == e || is_nan(dtype, a) && is_nan(dtype, e), "{context}: element {i} is {a:x?}, expected {e:x?}");
    }
}

/// Returns deterministic bytes. A quarter of the elements are awkward: zeros, infinities, NaNs,
/// extremes.
pub(super) fn sample(dtype: DataType, seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let special: &[u64] = match dtype {
        DataType::Float16 => &[0, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0x3c00, 0x0001, 0x7bff],
        DataType::Bfloat16 => &[0, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x3f80, 0x0001, 0x7f7f],
        DataType::Float32 => &[0, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0x3f80_0000, 1, 0x7f7f_ffff],
        DataType::Float8E4M3 => &[0, 0x80, 0x7f, 0xff, 0x7e, 0xfe, 0x01, 0x38],
        DataType::Float8E5M2 => &[0, 0x80, 0x7c, 0xfc, 0x7b, 0x7d, 0x01, 0x3c],
        DataType::Float64 => &[0, 1 << 63, 0x7ff << 52, 0xfff << 52, 0x7ff8 << 48, 0x3ff << 52, 1, (0x7ff << 52) - 1],
        _ => &[0, 1, 0x7f, 0x80, 0x7fff_ffff, 0x8000_0000, i64::MAX as u64, 1 << 63],
    };
    (0..count)
        .flat_map(|_| {
            let (value, pick) = (next(), next());
            let value = if pick % 4 == 0 { special[(pick >> 8) as usize % special.len()] } else { value };
            value.to_ne_bytes().into_iter().take(dtype.size())
        })
        .collect()
}

pub(super) fn expected(dtype: DataType, op: ReduceOp, inputs: &[Vec<u8>], count: usize) -> Vec<u8> {
    let size = dtype.size();
    (0..count)
        .flat_map(|i| {
            let values: Vec<[u8; 8]> = inputs
                .iter()
                .map(|input| {
                    let mut value = [0; 8];
                    value[..size].copy_from_slice(&input[i * size..(i + 1) * size]);
                    value
                })
                .collect();
            if let [only] = &values[..] { only[..size].to_vec() } else { reference(dtype, op, &values) }
        })
        .collect()
}
