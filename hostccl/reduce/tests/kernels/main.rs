//! Compares the kernels with a plain reference that takes one element at a time and shares no code
//! with them.

mod reference;

use half::{bf16, f16};
use hostccl_reduce::{DataType, ReduceOp, Target, plain, reduce, scale, stream};
use proptest::prelude::*;

use self::reference::{assert_elements, expected, is_nan, sample};

const DTYPES: [DataType; 12] = DataType::ALL;
const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg];

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
    [("chosen", reduce), ("plain", plain::reduce)]
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
fn maximum_and_minimum_keep_nan_and_order_zeros() {
    let run = |op, a: f32, b: f32| {
        let mut out = 0f32;
        let inputs = [std::ptr::from_ref(&a).cast(), std::ptr::from_ref(&b).cast()];
        // SAFETY: each buffer holds one element.
        unsafe { reduce(DataType::Float32, op, &inputs, &[Target::cached(std::ptr::from_mut(&mut out).cast())], 1) };
        out
    };
    for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN), (-f32::NAN, 1.0), (1.0, -f32::NAN)] {
        // The bits are equal, too, whichever rank has the NaN.
        assert_eq!(run(ReduceOp::Max, a, b).to_bits(), f32::NAN.to_bits(), "{a} and {b}");
        assert_eq!(run(ReduceOp::Min, a, b).to_bits(), f32::NAN.to_bits(), "{a} and {b}");
    }
    for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
        assert_eq!(run(ReduceOp::Max, a, b).to_bits(), 0f32.to_bits());
        assert_eq!(run(ReduceOp::Min, a, b).to_bits(), (-0f32).to_bits());
    }
    assert_eq!(run(ReduceOp::Max, f32::NEG_INFINITY, f32::MIN), f32::MIN);
}

/// A NaN of any input, sign and payload gives one result, in any order of the inputs, on every
/// path.
#[test]
fn a_nan_of_any_input_is_kept_in_any_order() {
    let nans: [(DataType, &[u64]); 6] = [
        (DataType::Float16, &[0x7e00, 0xfe00, 0x7c01, 0xffff]),
        (DataType::Bfloat16, &[0x7fc0, 0xffc0, 0x7f81, 0xffff]),
        (DataType::Float32, &[0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0xffff_ffff]),
        (DataType::Float64, &[0x7ff8 << 48, 0xfff8 << 48, (0x7ff << 52) + 1, u64::MAX]),
        (DataType::Float8E4M3, &[0x7f, 0xff]),
        (DataType::Float8E5M2, &[0x7d, 0x7e, 0x7f, 0xfd, 0xff]),
    ];
    for (dtype, nans) in nans {
        for (nan, at, count, op) in nans.iter().flat_map(|nan| {
            (0..5).flat_map(move |at| {
                [1, 9, 1030].into_iter().flat_map(move |n| [ReduceOp::Max, ReduceOp::Min].map(|op| (nan, at, n, op)))
            })
        }) {
            let mut inputs: Vec<Vec<u8>> = (0..5).map(|_| vec![0x31; count * dtype.size()]).collect();
            for element in [0, count - 1] {
                let place = element * dtype.size()..(element + 1) * dtype.size();
                inputs[at][place].copy_from_slice(&nan.to_ne_bytes()[..dtype.size()]);
            }
            let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
            for (name, kernel) in kernels() {
                let mut out = vec![0; count * dtype.size()];
                // SAFETY: every buffer holds `count` elements.
                unsafe { kernel(dtype, op, &pointers, &[Target::cached(out.as_mut_ptr())], count) };
                let context = format!("{name} {dtype:?} {op:?}, NaN {nan:x} of input {at}");
                assert!(is_nan(dtype, &out[..dtype.size()]), "{context}");
                assert_eq!(out[..dtype.size()], out[(count - 1) * dtype.size()..], "{context}");
                let middle = if count > 2 { &out[dtype.size()..2 * dtype.size()] } else { &[0x31; 8][..dtype.size()] };
                assert_eq!(middle, &[0x31; 8][..dtype.size()], "{context}");
            }
        }
    }
}

/// Averages the given inputs of one type on every path.
fn averages<T: Copy + PartialEq + std::fmt::Debug, const N: usize>(dtype: DataType, inputs: [T; N], expected: T) {
    for count in [1, 5, 70] {
        let inputs = inputs.map(|value| vec![value; count]);
        let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
        for (name, kernel) in kernels() {
            let mut out = inputs[0].clone();
            // SAFETY: every buffer holds `count` elements.
            unsafe { kernel(dtype, ReduceOp::Avg, &pointers, &[Target::cached(out.as_mut_ptr().cast())], count) };
            assert_eq!(out, vec![expected; count], "{name} {dtype:?}");
        }
    }
}

#[test]
fn averages_do_not_overflow() {
    averages(DataType::Uint8, [200u8; 4], 200);
    averages(DataType::Uint8, [255u8; 1024], 255);
    averages(DataType::Uint8, [255u8, 255, 254], 254);
    averages(DataType::Int8, [i8::MIN; 1023], i8::MIN);
    averages(DataType::Int8, [i8::MAX, i8::MAX, i8::MIN], 42);
    averages(DataType::Int8, [-1i8, -2], -1);
    averages(DataType::Int32, [i32::MIN; 7], i32::MIN);
    averages(DataType::Int32, [i32::MAX, i32::MAX, i32::MIN], 715_827_882);
    averages(DataType::Uint32, [u32::MAX; 1000], u32::MAX);
    averages(DataType::Int64, [i64::MIN; 5], i64::MIN);
    averages(DataType::Int64, [i64::MAX, i64::MAX, -3], 6_148_914_691_236_517_203);
    averages(DataType::Uint64, [u64::MAX; 1024], u64::MAX);
    averages(DataType::Uint64, [u64::MAX, u64::MAX - 1], u64::MAX - 1);
    averages(DataType::Float16, [f16::from_f32(60000.0); 4], f16::from_f32(60000.0));
    averages(DataType::Bfloat16, [bf16::MAX; 5], bf16::MAX);
    averages(DataType::Float32, [f32::MAX; 4], f32::MAX);
    averages(DataType::Float32, [f32::MAX, f32::MAX, -f32::MAX, -f32::MAX, 0.0], 0.0);
    averages(DataType::Float32, [f32::INFINITY, f32::MAX, f32::MAX], f32::INFINITY);
    averages(DataType::Float64, [f64::MIN; 8], f64::MIN);
    averages(DataType::Float8E4M3, [0x7eu8; 9], 0x7e);
    averages(DataType::Float8E5M2, [0xfbu8; 9], 0xfb);
}

/// Every 8-bit number survives, and every result between two numbers is rounded as it should be.
#[test]
fn float8_converts_exactly_and_rounds_to_nearest() {
    for dtype in [DataType::Float8E4M3, DataType::Float8E5M2] {
        let all: Vec<u8> = (0..=255).flat_map(|a: u8| (0..=255).map(move |_| a)).collect();
        let others: Vec<u8> = (0..=255).flat_map(|_| 0..=255u8).collect();
        for op in OPS {
            let expected = expected(dtype, op, &[all.clone(), others.clone()], all.len());
            for (name, kernel) in kernels() {
                let mut out = vec![0; all.len()];
                let inputs = [all.as_ptr(), others.as_ptr()];
                // SAFETY: every buffer holds 65536 elements.
                unsafe { kernel(dtype, op, &inputs, &[Target::cached(out.as_mut_ptr())], all.len()) };
                assert_elements(dtype, &format!("{name} {dtype:?} {op:?}"), &out, &expected);
            }
        }
    }
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
            let mut by_plain = Shifted::new(&input, 1);
            // SAFETY: every buffer holds `count` elements. In place, the input and the output have
            // one address.
            unsafe {
                scale(dtype, typed, input.as_ptr(), separate.as_mut_ptr(), count);
                let pointer = in_place.as_mut_ptr();
                scale(dtype, typed, pointer, pointer, count);
                let pointer = by_plain.as_mut_ptr();
                plain::scale(dtype, typed, pointer, pointer, count);
            }
            for (name, out) in [("apart", &separate[..]), ("in place", in_place.bytes()), ("plain", by_plain.bytes())] {
                assert_elements(dtype, &format!("{name} {dtype:?} {count}"), out, &expected);
            }
            assert!(in_place.surroundings_untouched() && by_plain.surroundings_untouched());
        }
    }
}

#[test]
fn integers_are_nccls() {
    for (raw, dtype) in DataType::ALL.into_iter().enumerate() {
        assert_eq!(dtype as usize, raw);
        assert_eq!(DataType::from_raw(raw as i32), Some(dtype));
    }
    for (raw, op) in ReduceOp::ALL.into_iter().enumerate() {
        assert_eq!(op as usize, raw);
        assert_eq!(ReduceOp::from_raw(raw as i32), Some(op));
    }
    assert_eq!(DataType::from_raw(-1), None);
    assert_eq!(DataType::from_raw(12), None);
    assert_eq!(ReduceOp::from_raw(5), None);
}

#[test]
fn every_byte_arrives_whatever_the_alignment() {
    let from: Vec<u8> = (0..1000_u32).map(|i| (i * 7) as u8).collect();
    for offset in [0, 1, 15, 63] {
        for bytes in [0, 1, 63, 64, 65, 127, 128, 500, 900] {
            let mut to = vec![0xEE; 1100];
            // SAFETY: both vectors are long enough.
            unsafe { stream(from.as_ptr().add(offset), to.as_mut_ptr().add(offset + 5), bytes) };
            assert_eq!(to[offset + 5..offset + 5 + bytes], from[offset..offset + bytes]);
            assert!(to[..offset + 5].iter().chain(&to[offset + 5 + bytes..]).all(|&byte| byte == 0xEE));
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
