//! Sizes on the command line.

/// The largest size, in bytes: 64 GiB.
const LARGEST: u128 = 64 << 30;

/// Reads a size of 1 byte to 64 GiB. 64MiB, 64M and 67108864 are equal, as with nccl-tests.
pub fn byte_size(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => {
            return Err(format!(
                "{text:?} has the unit {unit:?}; there are B, K or KiB, M or MiB, and G or GiB (powers of 1024)"
            ));
        }
    };
    let size = number.parse::<u128>().map(|number| number.saturating_mul(1 << shift));
    match size {
        Ok(size @ 1..=LARGEST) => Ok(size as usize),
        Ok(size) if size > LARGEST => Err(format!("{text:?} is too large: the largest size is 64GiB")),
        _ => Err(format!("{text:?} is not a size of 1B to 64GiB; write a whole number and a unit, as 64MiB")),
    }
}
