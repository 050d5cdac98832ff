//! The reduction operators that `ncclRedOpCreatePreMulSum` makes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};

use crate::collective::Reduction;
use crate::error::{Error, Result};
use crate::types::*;

/// An operator that `ncclRedOpCreatePreMulSum` made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreMulSum {
    /// The type of the elements and of the scalar.
    pub(crate) dtype: DataType,
    /// The number by which this rank multiplies its elements.
    pub(crate) scalar: Scalar,
}

/// The scalar of an operator.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Scalar {
    /// The bytes of the scalar, padded with zeros.
    Value([u8; 8]),
    /// The address of the scalar, which is read when an operation uses the operator.
    At(usize),
}

/// The number of the first operator that is made at run time. The numbers below are the built-in
/// ones.
const FIRST_OPERATOR: u32 = ReduceOp::ALL.len() as u32;
/// How many numbers there are for operators. They are positive.
const NUMBERS: u32 = i32::MAX as u32 - FIRST_OPERATOR + 1;

/// The operators of one communicator.
///
/// All communicators of the process draw their numbers from one sequence. So a communicator refuses
/// the operator of another communicator, and an operator that is destroyed. A number comes again
/// after 2^31 operators.
#[derive(Debug, Default)]
pub(crate) struct Operators {
    /// The operators by their numbers.
    list: RwLock<BTreeMap<ncclRedOp_t, PreMulSum>>,
}

impl Operators {
    /// Adds an operator and returns its number.
    pub(crate) fn add(&self, operator: PreMulSum) -> ncclRedOp_t {
        static DRAWN: AtomicU32 = AtomicU32::new(0);
        let mut operators = self.list.write().unwrap_or_else(PoisonError::into_inner);
        loop {
            let number = number(DRAWN.fetch_add(1, Ordering::Relaxed));
            if let Entry::Vacant(place) = operators.entry(number) {
                place.insert(operator);
                return number;
            }
        }
    }

    /// Removes the operator of that number.
    pub(crate) fn remove(&self, raw: ncclRedOp_t) -> Result<()> {
        let mut operators = self.list.write().unwrap_or_else(PoisonError::into_inner);
        operators.remove(&raw).map(drop).ok_or_else(|| {
            Error::argument(format!(
                "op {raw} was not made by ncclRedOpCreatePreMulSum for this communicator, or is destroyed"
            ))
        })
    }

    /// Returns the reduction of that number, for elements of `dtype`.
    pub(crate) fn reduction(&self, raw: ncclRedOp_t, dtype: DataType) -> Result<Reduction> {
        if let Some(op) = ReduceOp::from_raw(raw) {
            return Ok(Reduction::Plain(op));
        }
        let operators = self.list.read().unwrap_or_else(PoisonError::into_inner);
        let operator = operators.get(&raw).copied().ok_or_else(|| {
            Error::argument(format!(
                "op {raw} is not in 0..=4, and was not made for this communicator, or is destroyed"
            ))
        })?;
        if operator.dtype != dtype {
            return Err(Error::argument(format!(
                "op {raw} was made for {}, the call is for {}",
                operator.dtype.name(),
                dtype.name()
            )));
        }
        Ok(Reduction::PreMulSum(match operator.scalar {
            Scalar::Value(value) => value,
            // SAFETY: the caller of ncclRedOpCreatePreMulSum promised that the scalar stays
            // readable until the operator is destroyed.
            Scalar::At(address) => unsafe { read_scalar(address as *const u8, dtype) },
        }))
    }
}

/// Returns the operator's number for the place in the sequence of all operators of the process.
fn number(drawn: u32) -> ncclRedOp_t {
    (FIRST_OPERATOR + drawn % NUMBERS) as ncclRedOp_t
}

/// Reads the bytes of a scalar and pads them with zeros.
///
/// # Safety
/// `at` points to a readable element of that type.
pub(crate) unsafe fn read_scalar(at: *const u8, dtype: DataType) -> [u8; 8] {
    let mut scalar = [0; 8];
    // SAFETY: the caller's promise, and an element has at most eight bytes.
    unsafe { std::ptr::copy_nonoverlapping(at, scalar.as_mut_ptr(), dtype.size()) };
    scalar
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIPLE: PreMulSum = PreMulSum { dtype: DataType::Int32, scalar: Scalar::Value([3, 0, 0, 0, 0, 0, 0, 0]) };

    #[test]
    fn operators_are_numbered_after_the_built_in_ones() {
        let operators = Operators::default();
        let made = operators.add(TRIPLE);
        assert!(made >= 5, "{made}");
        assert!(operators.reduction(made, DataType::Int32).is_ok());
        assert!(operators.reduction(made, DataType::Int64).is_err());
        assert!(operators.reduction(-1, DataType::Int32).is_err());
        assert!(operators.remove(4).is_err());
        assert_eq!((number(0), number(NUMBERS - 1), number(NUMBERS)), (5, i32::MAX, 5));
        assert!(number(u32::MAX) >= 5);
    }

    #[test]
    fn no_communicator_takes_the_operator_of_another_one_or_one_that_is_destroyed() {
        let (first, second) = (Operators::default(), Operators::default());
        let (of_first, of_second) = (first.add(TRIPLE), second.add(TRIPLE));
        assert!(second.reduction(of_first, DataType::Int32).is_err());
        assert!(first.remove(of_second).is_err());
        first.remove(of_first).unwrap();
        assert!(first.remove(of_first).is_err());
        let next = first.add(TRIPLE);
        assert_ne!(next, of_first);
        assert!(first.reduction(of_first, DataType::Int32).is_err());
        assert!(first.reduction(next, DataType::Int32).is_ok());
    }
}
