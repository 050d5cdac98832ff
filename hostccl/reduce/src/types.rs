//! The element types and the reductions, with NCCL's numbers.

/// An element type.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DataType {
    /// `ncclInt8`, also `ncclChar`.
    Int8 = 0,
    /// `ncclUint8`.
    Uint8 = 1,
    /// `ncclInt32`, also `ncclInt`.
    Int32 = 2,
    /// `ncclUint32`.
    Uint32 = 3,
    /// `ncclInt64`.
    Int64 = 4,
    /// `ncclUint64`.
    Uint64 = 5,
    /// `ncclFloat16`, also `ncclHalf`.
    Float16 = 6,
    /// `ncclFloat32`, also `ncclFloat`.
    Float32 = 7,
    /// `ncclFloat64`, also `ncclDouble`.
    Float64 = 8,
    /// `ncclBfloat16`.
    Bfloat16 = 9,
    /// `ncclFloat8e4m3`: 4 bits of exponent and 3 of mantissa. The type has no infinities, and one
    /// NaN of each sign.
    Float8E4M3 = 10,
    /// `ncclFloat8e5m2`: 5 bits of exponent and 2 of mantissa.
    Float8E5M2 = 11,
}

impl DataType {
    /// Every type, in the order of its integer value.
    pub const ALL: [DataType; 12] = [
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
        DataType::Float8E4M3,
        DataType::Float8E5M2,
    ];

    /// Returns the type of that integer value.
    #[inline]
    pub fn from_raw(raw: i32) -> Option<DataType> {
        usize::try_from(raw).ok().and_then(|index| DataType::ALL.get(index).copied())
    }

    /// The size of one element in bytes.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            DataType::Int8 | DataType::Uint8 | DataType::Float8E4M3 | DataType::Float8E5M2 => 1,
            DataType::Float16 | DataType::Bfloat16 => 2,
            DataType::Int32 | DataType::Uint32 | DataType::Float32 => 4,
            DataType::Int64 | DataType::Uint64 | DataType::Float64 => 8,
        }
    }

    /// The name in messages, which has no prefix.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            DataType::Int8 => "int8",
            DataType::Uint8 => "uint8",
            DataType::Int32 => "int32",
            DataType::Uint32 => "uint32",
            DataType::Int64 => "int64",
            DataType::Uint64 => "uint64",
            DataType::Float16 => "float16",
            DataType::Float32 => "float32",
            DataType::Float64 => "float64",
            DataType::Bfloat16 => "bfloat16",
            DataType::Float8E4M3 => "float8e4m3",
            DataType::Float8E5M2 => "float8e5m2",
        }
    }
}

/// A reduction.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// `ncclSum`.
    Sum = 0,
    /// `ncclProd`.
    Prod = 1,
    /// `ncclMax`.
    Max = 2,
    /// `ncclMin`.
    Min = 3,
    /// `ncclAvg`: the sum divided by the number of ranks.
    Avg = 4,
}

impl ReduceOp {
    /// Every reduction, in the order of its integer value.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg];

    /// Returns the reduction of that integer value. Returns `None` for other values, also for the
    /// numbers that `ncclRedOpCreatePreMulSum` returned.
    #[inline]
    pub fn from_raw(raw: i32) -> Option<ReduceOp> {
        usize::try_from(raw).ok().and_then(|index| ReduceOp::ALL.get(index).copied())
    }

    /// The name in messages, which has no prefix.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Avg => "avg",
        }
    }
}
