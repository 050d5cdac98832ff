package devicemesh

// #include "shim.h"
import "C"

import (
	"math"
	"reflect"
	"unsafe"
)

// A DType is the type of a buffer's elements. It has the values of ncclDataType_t. On cuda every
// number up to 255 goes to NCCL, which refuses those that it does not know. The overlap of buffers
// of a type that is not listed here is not checked.
type DType int32

// The types of elements.
const (
	DTypeInt8       DType = C.DM_INT8
	DTypeUint8      DType = C.DM_UINT8
	DTypeInt32      DType = C.DM_INT32
	DTypeUint32     DType = C.DM_UINT32
	DTypeInt64      DType = C.DM_INT64
	DTypeUint64     DType = C.DM_UINT64
	DTypeFloat16    DType = C.DM_FLOAT16
	DTypeFloat32    DType = C.DM_FLOAT32
	DTypeFloat64    DType = C.DM_FLOAT64
	DTypeBFloat16   DType = C.DM_BFLOAT16
	DTypeFloat8E4M3 DType = C.DM_FLOAT8E4M3
	DTypeFloat8E5M2 DType = C.DM_FLOAT8E5M2
)

// An Op is a reduction operator. It has the values of ncclRedOp_t. A number that
// ncclRedOpCreatePreMulSum of the library (Mesh.Proc) has made for the communicator (Mesh.Comm) is
// an operator, too.
type Op int32

// The reduction operators. Avg is the sum divided by the number of ranks, truncated for integers.
// It does not overflow on the host engine. NCCL makes the sum of integers in their own type. Max
// and Min are NaN on the host engine where a rank has NaN; NCCL ignores a NaN where another rank
// has a number.
const (
	Sum  Op = C.DM_SUM
	Prod Op = C.DM_PROD
	Max  Op = C.DM_MAX
	Min  Op = C.DM_MIN
	Avg  Op = C.DM_AVG
)

// Element is a type that collectives can reduce and copy. int and uint are 64-bit integers.
// Float8E4M3 and Float8E5M2 are among the types made of uint8, and travel as what they are. A type
// that a program makes of them (type W Float8E4M3) does not: Go makes it of uint8, so its elements
// are reduced as integers. Convert such a slice, or pass a Buffer with the DType.
type Element interface {
	~int8 | ~uint8 | ~int32 | ~uint32 | ~int64 | ~uint64 | ~int | ~uint | ~float32 | ~float64 | Float16 | BFloat16
}

func dtypeOf[T Element]() DType {
	var element T
	switch any(element).(type) {
	case Float16:
		return DTypeFloat16
	case BFloat16:
		return DTypeBFloat16
	case Float8E4M3:
		return DTypeFloat8E4M3
	case Float8E5M2:
		return DTypeFloat8E5M2
	}
	switch reflect.TypeFor[T]().Kind() {
	case reflect.Int8:
		return DTypeInt8
	case reflect.Uint8:
		return DTypeUint8
	case reflect.Int32:
		return DTypeInt32
	case reflect.Uint32:
		return DTypeUint32
	case reflect.Int64, reflect.Int:
		return DTypeInt64
	case reflect.Uint64, reflect.Uint:
		return DTypeUint64
	case reflect.Float32:
		return DTypeFloat32
	default:
		return DTypeFloat64
	}
}

// A Buffer is memory that a collective reads or writes: a slice's (Of), or any other. On cuda it
// is device memory.
type Buffer struct {
	Address unsafe.Pointer
	Count   int // The number of elements.
	DType   DType
}

// at gives the address as an integer, which C takes. The caller has the memory pinned.
func (b Buffer) at() C.uintptr_t {
	return C.uintptr_t(uintptr(b.Address))
}

// bytes gives the buffer's size in bytes. It is 0 for a type that is not known here.
func (b Buffer) bytes() uintptr {
	return uintptr(max(0, b.Count)) * b.DType.size()
}

// The bytes of an element, by DType.
var sizes = [...]uintptr{1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}

// size gives the bytes of an element. It is 0 for a type that is not known here.
func (d DType) size() uintptr {
	if d < 0 || int(d) >= len(sizes) {
		return 0
	}
	return sizes[d]
}

// The largest number that may be a type of a later NCCL.
const largestDType = 255

// nothing is the address of an empty slice, because the library takes no NULL.
var nothing [8]byte

// Of gives a slice's memory without copying it.
func Of[T Element](values []T) Buffer {
	if len(values) == 0 {
		return Buffer{unsafe.Pointer(&nothing), 0, dtypeOf[T]()}
	}
	return Buffer{unsafe.Pointer(unsafe.SliceData(values)), len(values), dtypeOf[T]()}
}

// A Stream is a cudaStream_t as an integer, because CUDA has streams such as cudaStreamPerThread (2)
// that are no addresses. It is 0 on cpu.
type Stream uintptr

// same refuses two buffers that differ in type.
func (a *arguments) same(send, recv Buffer) {
	if send.DType != recv.DType {
		a.refuse("send has elements of type %d, recv of type %d", send.DType, recv.DType)
	}
}

// sameCount refuses two buffers that differ in length or type.
func (a *arguments) sameCount(send, recv Buffer) {
	a.same(send, recv)
	if send.Count != recv.Count {
		a.refuse("send has %d elements, recv has %d", send.Count, recv.Count)
	}
}

// times refuses a large buffer whose length is not the length of small times the number of ranks.
func (a *arguments) times(its string, large Buffer, other string, small Buffer, ranks int) {
	a.same(large, small)
	if ranks > 0 && (large.Count%ranks != 0 || large.Count/ranks != small.Count) {
		a.refuse("%s has %d elements, but it needs %d ranks times the %d elements of %s", its, large.Count, ranks, small.Count, other)
	}
}

// buffer refuses a buffer that no collective of the mesh can use, and has it pinned during the
// call.
func (a *arguments) buffer(b Buffer, m *Mesh) {
	known := b.DType.size() > 0
	switch {
	case b.Count < 0:
		a.refuse("a buffer has %d elements", b.Count)
	case !known && (b.DType < 0 || b.DType > largestDType || !m.onCUDA()):
		a.refuse("a buffer has elements of type %d, not one of 0 to %d", b.DType, len(sizes)-1)
	case b.Count > 0 && b.Address == nil:
		a.refuse("a buffer of %d elements has no address", b.Count)
	case uintptr(b.Count) > math.MaxInt/max(1, b.DType.size()):
		a.refuse("a buffer has %d elements, more than memory can hold", b.Count)
	default:
		a.use(b.Address)
	}
}

// onCUDA says whether the mesh has device type cuda.
func (m *Mesh) onCUDA() bool {
	kind, err := m.DeviceType()
	return err == nil && kind == "cuda"
}

// op refuses an operator that cannot exist. The communicator library judges the numbers that it may
// have given itself.
func (a *arguments) op(op Op) {
	if op < 0 {
		a.refuse("op is %d, not one of %d to %d", op, Sum, Avg)
	}
}

// member gives a rank along a dimension, and refuses one that does not exist.
func (a *arguments) member(what string, rank int, along place) C.int32_t {
	if rank < 0 || rank >= along.size {
		a.refuse("%s is %d, but the dimension has ranks 0 to %d", what, rank, along.size-1)
	}
	return a.int32(what, rank)
}

func overlap(one, other Buffer) bool {
	first, second := uintptr(one.Address), uintptr(other.Address)
	return first < second+other.bytes() && second < first+one.bytes() && one.bytes() > 0 && other.bytes() > 0
}

// apartOrSame refuses a part and a whole that overlap, unless the part begins exactly `elements`
// elements into the whole, as in a call in place.
func (a *arguments) apartOrSame(part, whole Buffer, elements int) {
	place := uintptr(whole.Address) + uintptr(elements)*whole.DType.size()
	if overlap(part, whole) && uintptr(part.Address) != place {
		a.refuse("send and recv overlap: let them lie apart; a call in place needs them exactly %d bytes apart, and they are %d bytes apart",
			place-uintptr(whole.Address), int(uintptr(part.Address)-uintptr(whole.Address)))
	}
}
