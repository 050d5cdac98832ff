//! Compares the kernels with a plain reference that takes one element at a time and shares no code
//! with them.

use super::block::{reduce_all, scale_all};
use super::isa::Plain;
use super::{Target, reduce, scale};
use crate::types::{DataType, ReduceOp};
use half::{bf16, f16};
use proptest::prelude::*;

const DTYPES: [DataType; 10] = [
    DataType::Int8,
    DataType::Uint8,
    DataType::Int32,
    DataType::Uint32,
    DataType::Int64,
    DataType::Uint64,
    DataType::Float16,
    DataType::Float32,
    DataType::Float64,
    DataType::Bfloat16,
];
const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg];

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
                ReduceOp::Avg => (all.fold(first, <$type>::wrapping_add) as i128 / values.len() as i128) as $type,
            };
            result.to_ne_bytes().to_vec()
        }};
    }
    macro_rules! float {
        ($values:expr, $type:ty) => {{
            let mut all = $values;
            let first: $type = all.next().unwrap();
            // A number wins over a NaN. Of two zeros the positive one is larger.
            let above = |a: $type, b: $type| a > b || b.is_nan() || (a == b && a.is_sign_positive());
            let below = |a: $type, b: $type| a < b || b.is_nan() || (a == b && a.is_sign_negative());
            match op {
                ReduceOp::Sum => all.fold(first, |a, b| a + b),
                ReduceOp::Prod => all.fold(first, |a, b| a * b),
                ReduceOp::Max => all.fold(first, |a, b| if above(a, b) { a } else { b }),
                ReduceOp::Min => all.fold(first, |a, b| if below(a, b) { a } else { b }),
                ReduceOp::Avg => all.fold(first, |a, b| a + b) / values.len() as $type,
            }
        }};
    }
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
    }
}

fn is_nan(dtype: DataType, bytes: &[u8]) -> bool {
    match dtype {
        DataType::Float16 => f16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Bfloat16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Float32 => f32::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Float64 => f64::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        _ => false,
    }
}

/// Expects equal bits, except that any NaN equals any other.
fn assert_elements(dtype: DataType, context: &str, actual: &[u8], expected: &[u8]) {
    assert_eq!(actual.len(), expected.len());
    for (i, (a, e)) in actual.chunks(dtype.size()).zip(expected.chunks(dtype.size())).enumerate() {
        assert!(a == e || is_nan(dtype, a) && is_nan(dtype, e), "{context}: element {i} is {a:x?}, expected {e:x?}");
    }
}

/// Returns deterministic bytes. A quarter of the elements are awkward: zeros, infinities, NaNs,
/// extremes.
fn sample(dtype: DataType, seed: u64, count: usize) -> Vec<u8> {
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

fn expected(dtype: DataType, op: ReduceOp, inputs: &[Vec<u8>], count: usize) -> Vec<u8> {
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

/// A copy of `bytes` that starts `shift` bytes after an address divisible by 64, in a larger
/// buffer.
struct Shifted {
    /// The copy, with other bytes around it.
    buffer: Vec<u8>,
    /// Where the copy begins in the buffer.
    start: usize,
    /// The length of the copy in bytes.
    len: usize,
}

impl Shifted {
    fn new(bytes: &[u8], shift: usize) -> Self {
        let mut buffer = vec![0xa5; bytes.len() + 128];
        let start = buffer.as_ptr().align_offset(64) + shift;
        buffer[start..start + bytes.len()].copy_from_slice(bytes);
        Shifted { buffer, start, len: bytes.len() }
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.start + self.len]
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.buffer[self.start..].as_mut_ptr()
    }

    /// Whether the bytes around the copy are unchanged.
    fn surroundings_untouched(&self) -> bool {
        let (before, after) = (&self.buffer[..self.start], &self.buffer[self.start + self.len..]);
        before.iter().chain(after).all(|&byte| byte == 0xa5)
    }
}

type Kernel = unsafe fn(DataType, ReduceOp, &[*const u8], &[Target], usize);

/// Returns the kernel that `reduce` chooses, and the plain one. `reduce` copies a single input
/// without a kernel.
fn kernels() -> [(&'static str, Kernel); 2] {
    [("chosen", reduce), ("plain", reduce_all::<Plain>)]
}

fn check(dtype: DataType, op: ReduceOp, samples: &[Vec<u8>], count: usize, shifts: &[usize], alias: Option<usize>) {
    let expected = expected(dtype, op, samples, count);
    for (name, kernel) in kernels().into_iter().take(if samples.len() == 1 { 1 } else { 2 }) {
        let mut inputs: Vec<Shifted> =
            samples.iter().enumerate().map(|(i, s)| Shifted::new(s, shifts[i % shifts.len()])).collect();
        let mut separate = Shifted::new(&vec![0x5a; count * dtype.size()], shifts[samples.len() % shifts.len()]);
        let pointers: Vec<*mut u8> = inputs.iter_mut().map(Shifted::as_mut_ptr).collect();
        let out = alias.map_or_else(|| separate.as_mut_ptr(), |k| pointers[k]);
        let sources: Vec<*const u8> = pointers.iter().map(|p| p.cast_const()).collect();
        let mut streamed = Shifted::new(&vec![0xc3; count * dtype.size()], shifts[(samples.len() + 1) % shifts.len()]);
        let targets = [Target::cached(out), Target { at: streamed.as_mut_ptr(), stream: true }];
        // SAFETY: every buffer holds `count` elements. `out` is a buffer of its own or exactly one
        // of the inputs.
        unsafe { kernel(dtype, op, &sources, &targets, count) };
        let written = alias.map_or(&separate, |k| &inputs[k]);
        let context = format!("{name} {dtype:?} {op:?} {} inputs, count {count}, alias {alias:?}", samples.len());
        assert_elements(dtype, &context, written.bytes(), &expected);
        assert!(
            streamed.bytes() == written.bytes() && streamed.surroundings_untouched(),
            "{context}: the streamed copy"
        );
        for (k, input) in inputs.iter().enumerate() {
            assert!(input.surroundings_untouched(), "{context}: wrote beside input {k}");
            assert!(alias == Some(k) || input.bytes() == samples[k], "{context}: changed input {k}");
        }
        assert!(separate.surroundings_untouched(), "{context}: wrote beside the output");
    }
}

#[test]
fn every_type_and_operation_agrees_with_the_reference() {
    for dtype in DTYPES {
        for op in OPS {
            for (inputs, count) in [(1, 9), (2, 0), (2, 1), (3, 7), (2, 1023), (8, 65), (3, 4097), (5, 8192 + 3)] {
                let samples: Vec<Vec<u8>> = (0..inputs).map(|k| sample(dtype, 77 * k + 1, count)).collect();
                check(dtype, op, &samples, count, &[0], None);
            }
        }
    }
}

#[test]
fn more_inputs_than_a_byte_counts_still_average() {
    for dtype in DTYPES {
        let samples: Vec<Vec<u8>> = (0..300).map(|k| sample(dtype, k + 1, 5)).collect();
        check(dtype, ReduceOp::Avg, &samples, 5, &[0], None);
    }
}

#[test]
fn no_inputs_write_nothing() {
    let mut out = [7u8; 4];
    // SAFETY: nothing is read, and `out` holds one element.
    unsafe { reduce(DataType::Int32, ReduceOp::Sum, &[], &[Target::cached(out.as_mut_ptr())], 1) };
    assert_eq!(out, [7; 4]);
}

#[test]
fn half_sums_round_once() {
    // Rounding 2048 + 1 + 1 after every addition would stay at 2048, where neighbours in f16 differ
    // by 2.
    let inputs = [2048.0, 1.0, 1.0].map(f16::from_f32);
    let pointers = inputs.each_ref().map(|v| std::ptr::from_ref(v).cast::<u8>());
    let mut out = f16::ZERO;
    // SAFETY: each buffer holds one element.
    unsafe {
        reduce(DataType::Float16, ReduceOp::Sum, &pointers, &[Target::cached(std::ptr::from_mut(&mut out).cast())], 1)
    };
    assert_eq!(out.to_f32(), 2050.0);
}

#[test]
fn maximum_and_minimum_ignore_nan_and_order_zeros() {
    let run = |op, a: f32, b: f32| {
        let mut out = 0f32;
        let inputs = [std::ptr::from_ref(&a).cast(), std::ptr::from_ref(&b).cast()];
        // SAFETY: each buffer holds one element.
        unsafe { reduce(DataType::Float32, op, &inputs, &[Target::cached(std::ptr::from_mut(&mut out).cast())], 1) };
        out
    };
    for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN), (-f32::NAN, 1.0), (1.0, -f32::NAN)] {
        assert_eq!((run(ReduceOp::Max, a, b), run(ReduceOp::Min, a, b)), (1.0, 1.0), "{a} and {b}");
    }
    assert!(run(ReduceOp::Max, f32::NAN, f32::NAN).is_nan());
    for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
        assert_eq!(run(ReduceOp::Max, a, b).to_bits(), 0f32.to_bits());
        assert_eq!(run(ReduceOp::Min, a, b).to_bits(), (-0f32).to_bits());
    }
    assert_eq!(run(ReduceOp::Max, f32::NEG_INFINITY, f32::MIN), f32::MIN);
}

/// Adds the neutral -0 to every value of the type, so that every value is widened and rounded back.
#[test]
fn every_half_value_survives_on_every_path() {
    for (dtype, zero) in [(DataType::Float16, 0x8000u16), (DataType::Bfloat16, 0x8000)] {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        let zeros: Vec<u8> = (0..=u16::MAX).flat_map(|_| zero.to_ne_bytes()).collect();
        for (name, kernel) in kernels() {
            let mut out = vec![0u8; all.len()];
            // SAFETY: every buffer holds 65536 elements.
            unsafe {
                kernel(
                    dtype,
                    ReduceOp::Sum,
                    &[all.as_ptr(), zeros.as_ptr()],
                    &[Target::cached(out.as_mut_ptr())],
                    1 << 16,
                )
            };
            assert_elements(dtype, &format!("{name} {dtype:?}"), &out, &all);
        }
    }
}

#[test]
fn scale_multiplies_in_the_element_type() {
    for dtype in DTYPES {
        for count in [0, 1, 7, 1023, 4097] {
            let input = sample(dtype, 5, count);
            let scalar = sample(dtype, 11, 1);
            let factors = scalar.repeat(count);
            let expected = expected(dtype, ReduceOp::Prod, &[input.clone(), factors], count);
            let mut typed = [0xff; 8];
            typed[..scalar.len()].copy_from_slice(&scalar);
            let mut separate = vec![0; input.len()];
            let mut in_place = Shifted::new(&input, 3);
            let mut plain = Shifted::new(&input, 1);
            // SAFETY: every buffer holds `count` elements. In place, input and output are one
            // address.
            unsafe {
                scale(dtype, typed, input.as_ptr(), separate.as_mut_ptr(), count);
                let pointer = in_place.as_mut_ptr();
                scale(dtype, typed, pointer, pointer, count);
                let pointer = plain.as_mut_ptr();
                scale_all::<Plain>(dtype, typed, pointer, pointer, count);
            }
            for (name, out) in [("apart", &separate[..]), ("in place", in_place.bytes()), ("plain", plain.bytes())] {
                assert_elements(dtype, &format!("{name} {dtype:?} {count}"), out, &expected);
            }
            assert!(in_place.surroundings_untouched() && plain.surroundings_untouched());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]
    #[test]
    fn any_reduction_agrees_with_the_reference(
        dtype in prop::sample::select(&DTYPES[..]),
        op in prop::sample::select(&OPS[..]),
        inputs in 1usize..=8,
        count in prop_oneof![0usize..70, 500usize..1500],
        shifts in prop::collection::vec(0usize..64, 1..9),
        alias in prop::option::of(0usize..8),
        seed: u64,
    ) {
        let samples: Vec<Vec<u8>> = (0..inputs as u64).map(|k| sample(dtype, seed ^ k, count)).collect();
        check(dtype, op, &samples, count, &shifts, alias.map(|k| k % inputs));
    }
}
