//! The reduction operators that `ncclRedOpCreatePreMulSum` makes.

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
const FIRST_OPERATOR: usize = ReduceOp::ALL.len();

/// The operators of one communicator.
#[derive(Debug, Default)]
pub(crate) struct Operators {
    /// The operators by number, from [`FIRST_OPERATOR`] on. A destroyed one leaves a free place.
    list: RwLock<Vec<Option<PreMulSum>>>,
}

impl Operators {
    /// Adds an operator and returns its number.
    pub(crate) fn add(&self, operator: PreMulSum) -> ncclRedOp_t {
        let mut operators = self.list.write().unwrap_or_else(PoisonError::into_inner);
        let free = operators.iter().position(Option::is_none).unwrap_or_else(|| {
            operators.push(None);
            operators.len() - 1
        });
        operators[free] = Some(operator);
        (free + FIRST_OPERATOR) as ncclRedOp_t
    }

    /// Removes the operator of that number.
    pub(crate) fn remove(&self, raw: ncclRedOp_t) -> Result<()> {
        let mut operators = self.list.write().unwrap_or_else(PoisonError::into_inner);
        usize::try_from(raw)
            .ok()
            .and_then(|raw| raw.checked_sub(FIRST_OPERATOR))
            .and_then(|index| operators.get_mut(index)?.take())
            .map(|_| ())
            .ok_or_else(|| {
                Error::argument(format!("op {raw} was not made by ncclRedOpCreatePreMulSum, or is destroyed"))
            })
    }

    /// Returns the reduction of that number, for elements of `dtype`.
    pub(crate) fn reduction(&self, raw: ncclRedOp_t, dtype: DataType) -> Result<Reduction> {
        if let Some(op) = ReduceOp::from_raw(raw) {
            return Ok(Reduction::Plain(op));
        }
        let operators = self.list.read().unwrap_or_else(PoisonError::into_inner);
        let operator = usize::try_from(raw)
            .ok()
            .and_then(|raw| raw.checked_sub(FIRST_OPERATOR))
            .and_then(|index| operators.get(index).copied().flatten())
            .ok_or_else(|| {
                Error::argument(format!("op {raw} is not in 0..=4, and was not made for this communicator"))
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

    #[test]
    fn operators_are_numbered_after_the_built_in_ones() {
        let operators = Operators::default();
        let operator = PreMulSum { dtype: DataType::Int32, scalar: Scalar::Value([3, 0, 0, 0, 0, 0, 0, 0]) };
        assert_eq!(operators.add(operator), 5);
        assert_eq!(operators.add(operator), 6);
        operators.remove(5).unwrap();
        assert!(operators.remove(5).is_err());
        assert_eq!(operators.add(operator), 5);
        assert!(operators.reduction(5, DataType::Int32).is_ok());
        assert!(operators.reduction(5, DataType::Int64).is_err());
        assert!(operators.reduction(7, DataType::Int32).is_err());
        assert!(operators.reduction(-1, DataType::Int32).is_err());
        assert!(operators.remove(4).is_err());
    }
}
