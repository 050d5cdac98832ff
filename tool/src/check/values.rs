//! The data with which collectives are verified. They are integers that the element type holds
//! exactly and that tell from which rank and index they come.

use devicemesh::ccl::DATA_TYPES;

/// The element types that can be verified: those whose integers go far enough to tell ranks and
/// indices apart. The 8-bit floating-point types do not.
pub const CHECKED: &[(&str, usize)] = (&DATA_TYPES as &[(&str, usize)]).split_at(10).0;

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Its `ncclDataType_t` number.
    pub dtype: usize,
}

/// The value that an element of a result must have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    /// The number.
    pub value: f64,
    /// The largest difference between the element and the number. It is not 0 for averages in
    /// floating point, which are rounded.
    pub tolerance: f64,
    /// The number as an element.
    bits: Element,
}

/// The bytes of an element. Those that the type does not need are 0.
type Element = [u8; 8];

/// A rank in its group.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Its position in the group.
    pub position: usize,
    /// The number of ranks in the group.
    pub of: usize,
}

impl Kind {
    pub fn named(name: &str) -> Option<Kind> {
        CHECKED.iter().position(|(known, _)| *known == name).map(|dtype| Kind { dtype })
    }

    pub fn name(self) -> &'static str {
        CHECKED[self.dtype].0
    }

    pub fn bytes(self) -> usize {
        CHECKED[self.dtype].1
    }

    /// Element `index` of the world rank `rank`, for collectives that move or compare elements. Two
    /// ranks that are less than [`modulus`](Kind::modulus) apart never have equal elements at one
    /// index. Neighbouring elements are unrelated.
    pub fn moved(self, rank: usize, index: usize) -> i64 {
        let modulus = self.modulus();
        let (high, low) = (rank as u64 / modulus, rank as u64 % modulus);
        let value = (low + mix(index as u64 ^ (high << 40)) % modulus) % modulus;
        let middle = if self.is_unsigned() { 0 } else { modulus / 2 };
        value as i64 - middle as i64
    }

    /// An element for sums. No partial sum is more than the type holds exactly, in any order.
    pub fn summand(self, member: Member, index: usize) -> i64 {
        let (position, of, mixed) = (member.position as u64, member.of as u64, mix(index as u64));
        let most = (self.exact() / of).min(self.modulus() - 1);
        match most {
            // The type cannot count the ranks, so only some of them add one.
            0 => i64::from((position + mixed % of) % of < self.exact()),
            most => ((position + mixed % (most + 1)) % (most + 1)) as i64,
        }
    }

    /// An element for products: 2 or 1, with as many twos as the type has room for.
    pub fn factor(self, member: Member, index: usize) -> i64 {
        let (position, of, mixed) = (member.position as u64, member.of as u64, mix(index as u64));
        let twos = 1 + mix(mixed) % self.exponent().min(of);
        if (position + mixed % of) % of < twos { 2 } else { 1 }
    }

    /// An integer as an element. It is one that [`moved`](Kind::moved) and the others give, or an
    /// exact result of them.
    pub fn encode(self, value: i64) -> Element {
        let float = (value as f32).to_bits();
        let bytes = match self.dtype {
            0 | 1 => u64::from(value as u8),
            2 | 3 => u64::from(value as u32),
            4 | 5 => value as u64,
            6 => u64::from(half(float)),
            7 => u64::from(float),
            8 => (value as f64).to_bits(),
            _ => u64::from(float >> 16),
        };
        bytes.to_le_bytes()
    }

    /// An element as a number, for comparing and for messages.
    pub fn decode(self, element: &[u8]) -> f64 {
        let mut bytes = [0; 8];
        let size = self.bytes();
        bytes[..size].copy_from_slice(&element[..size]);
        let bits = u64::from_le_bytes(bytes);
        match self.dtype {
            0 => f64::from(bits as i8),
            2 => f64::from(bits as i32),
            4 => bits as i64 as f64,
            1 | 3 | 5 => bits as f64,
            6 => unhalf(bits as u16),
            7 => f64::from(f32::from_bits(bits as u32)),
            8 => f64::from_bits(bits),
            _ => f64::from(f32::from_bits((bits as u32) << 16)),
        }
    }

    /// An exact result.
    pub fn exactly(self, value: i64) -> Expected {
        Expected { value: value as f64, tolerance: 0.0, bits: self.encode(value) }
    }

    /// The average of `of` summands. Integers are truncated. Floating point is rounded at most once
    /// for each rank.
    pub fn average(self, sum: i64, of: usize) -> Expected {
        if self.is_integer() {
            return self.exactly(sum / of as i64);
        }
        let value = sum as f64 / of as f64;
        Expected {
            value,
            tolerance: value.abs() * self.epsilon() * (of + 1) as f64,
            bits: self.encode(sum / of as i64),
        }
    }

    /// Whether the element is what is expected.
    pub fn fits(self, element: &[u8], expected: &Expected) -> bool {
        let size = self.bytes();
        // The bytes are compared first, because most are equal, and because large integers are not
        // exact as f64.
        element[..size] == expected.bits[..size] && expected.tolerance == 0.0
            || !self.is_integer() && (self.decode(element) - expected.value).abs() <= expected.tolerance
    }

    fn is_unsigned(self) -> bool {
        [1, 3, 5].contains(&self.dtype)
    }

    fn is_integer(self) -> bool {
        self.dtype < 6
    }

    /// A prime, such that at least twice as many integers are exact in the type.
    fn modulus(self) -> u64 {
        match self.dtype {
            0 | 1 => 127,
            9 => 251,
            6 => 2039,
            _ => 65_521,
        }
    }

    /// The largest integer up to which every integer is exact.
    fn exact(self) -> u64 {
        match self.dtype {
            0 => i8::MAX as u64,
            1 => u8::MAX as u64,
            2 => i32::MAX as u64,
            3 => u32::MAX as u64,
            6 => 1 << 11,
            7 => 1 << 24,
            9 => 1 << 8,
            _ => 1 << 53,
        }
    }

    /// The exponent of the largest power of two that is exact in the type and in an i64.
    fn exponent(self) -> u64 {
        match self.dtype {
            0 => 6,
            1 => 7,
            2 => 30,
            3 => 31,
            6 => 15,
            _ => 62,
        }
    }

    /// The difference between 1 and the next number.
    fn epsilon(self) -> f64 {
        match self.dtype {
            6 => (2.0f64).powi(-10),
            7 => f64::from(f32::EPSILON),
            9 => (2.0f64).powi(-7),
            _ => f64::EPSILON,
        }
    }
}

/// The last step of SplitMix64 (Steele, Lea and Flood 2014). Inputs that are close give outputs
/// that are not.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Converts a binary32 to binary16. It is an integer below 65536 with at most 11 bits.
fn half(float: u32) -> u16 {
    let (sign, exponent, fraction) = (float >> 31, float >> 23 & 0xff, float & 0x7f_ffff);
    match exponent {
        0 => 0,
        exponent => (sign << 15 | (exponent + 15 - 127) << 10 | fraction >> 13) as u16,
    }
}

/// Converts a binary16 to a number.
fn unhalf(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    let size = match exponent {
        0 => fraction * (2.0f64).powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        exponent => (1.0 + fraction / 1024.0) * (2.0f64).powi(exponent - 15),
    };
    if bits >> 15 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds() -> impl Iterator<Item = Kind> {
        (0..CHECKED.len()).map(|dtype| Kind { dtype })
    }

    #[test]
    fn every_value_that_is_sent_is_exact_in_its_type() {
        for kind in kinds() {
            for (rank, of) in [(0, 1), (1, 2), (6, 7), (255, 256), (999, 1000), (4095, 5000)] {
                for index in (0..300).chain([65_536, 1 << 33]) {
                    let member = Member { position: rank, of };
                    let sent = [kind.moved(rank, index), kind.summand(member, index), kind.factor(member, index)];
                    for value in sent {
                        assert_eq!(kind.decode(&kind.encode(value)), value as f64, "{} rank {rank}", kind.name());
                    }
                }
            }
        }
    }

    #[test]
    fn sums_and_products_stay_exact_however_many_ranks() {
        for kind in kinds() {
            for of in [1, 2, 3, 8, 127, 128, 1000] {
                for index in 0..50 {
                    let members = || (0..of).map(|position| Member { position, of });
                    let sum: i64 = members().map(|member| kind.summand(member, index)).sum();
                    let product: i64 = members().map(|member| kind.factor(member, index)).product();
                    assert!(sum as u64 <= kind.exact(), "{} of {of}: {sum}", kind.name());
                    for result in [sum, product] {
                        let expected = kind.exactly(result);
                        assert!(kind.fits(&kind.encode(result), &expected), "{} of {of}: {result}", kind.name());
                        assert_eq!(kind.decode(&kind.encode(result)), result as f64, "{} of {of}", kind.name());
                    }
                }
            }
        }
    }

    #[test]
    fn another_rank_or_another_order_gives_other_data() {
        for kind in kinds() {
            for index in 0..100 {
                assert_ne!(kind.moved(3, index), kind.moved(4, index), "{}", kind.name());
                assert_ne!(kind.moved(0, index), kind.moved(126, index), "{}", kind.name());
            }
            let block = |from: usize| (from..from + 17).map(|index| kind.moved(1, index)).collect::<Vec<_>>();
            assert_ne!(block(0), block(1));
            assert_ne!(block(0), block(17));
        }
    }

    #[test]
    fn averages_of_integers_are_truncated_and_others_may_be_rounded() {
        let [int, float] = ["int32", "float32"].map(|name| Kind::named(name).unwrap());
        assert_eq!(int.average(11, 3), int.exactly(3));
        let expected = float.average(10, 3);
        assert!(float.fits(&(10.0f32 / 3.0).to_le_bytes(), &expected));
        assert!(float.fits(&(10.0f32 * (1.0 / 3.0)).to_le_bytes(), &expected));
        assert!(
            !float.fits(&(10.0f32).to_le_bytes(), &expected) && !float.fits(&(11.0f32 / 3.0).to_le_bytes(), &expected)
        );
    }

    #[test]
    fn half_precision_is_read_and_written_as_ieee_754_says() {
        let half = Kind::named("float16").unwrap();
        assert_eq!(half.encode(1)[..2], 0x3c00u16.to_le_bytes());
        assert_eq!(half.encode(-1019)[..2], 0xe3f6u16.to_le_bytes());
        assert_eq!(half.encode(1 << 15)[..2], 0x7800u16.to_le_bytes());
        assert_eq!(half.decode(&0x3555u16.to_le_bytes()), 0.333_251_953_125);
        assert_eq!(Kind::named("bfloat16").unwrap().encode(3)[..2], 0x4040u16.to_le_bytes());
    }
}
