//! Typed pointers to global and shared memory, with a constant offset that is folded into the instruction.

use super::{Builder, IntoOperand, Value};
use crate::{
    ir::Operand,
    isa::{
        Access, AtomicOp, Bf16x2, Class, E4m3x2, Element, Eviction, F16x2, MemoryOp, Op, Order, Policy,
        PureOp, Scalar, Scope, Space,
    },
};
use half::{bf16, f16};
use std::{fmt, marker::PhantomData};

/// Types with the same representation in memory as in registers.
pub trait Stored: Scalar {
    /// The element of their loads and stores.
    const ELEMENT: Element;
}

macro_rules! stored {
    ($($ty:ty: $element:ident),*) => {$(
        impl Stored for $ty {
            const ELEMENT: Element = Element::$element;
        }
    )*};
}
stored!(
    u16: B16, i16: B16, f16: B16, bf16: B16, E4m3x2: B16, u32: B32, i32: B32, f32: B32, F16x2: B32, Bf16x2: B32,
    u64: B64, i64: B64, f64: B64
);

/// The address of elements `T`. The address type `A` is `u64` for global and `u32` for shared memory.
#[derive(Clone, Copy)]
pub struct Pointer<'k, T, A> {
    base: Value<'k, A>,
    /// The constant offset in bytes.
    offset: i64,
    space: Space,
    ty: PhantomData<T>,
}

/// An address in global memory.
pub type Global<'k, T> = Pointer<'k, T, u64>;
/// An address in shared memory.
pub type Shared<'k, T> = Pointer<'k, T, u32>;

impl<T, A> fmt::Debug for Pointer<'_, T, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} + {} ({:?})", self.base, self.offset, self.space)
    }
}

impl<T: Scalar> Global<'_, T> {
    /// Element `index` of an array with possibly more than 2^32 elements.
    #[must_use]
    #[track_caller]
    pub fn at_wide(self, index: impl IntoOperand<u64>) -> Self {
        let k = self.base.builder();
        let size = Operand::Const(T::CLASS.bytes() as u64);
        Self { base: k.compute(PureOp::MadU64, &[index.into_operand(), size, self.base.operand()]), ..self }
    }
}

impl<T: Scalar> Shared<'_, T> {
    /// The address advanced by `bytes`.
    #[must_use]
    #[track_caller]
    pub fn byte(self, bytes: impl IntoOperand<u32>) -> Self {
        let k = self.base.builder();
        if let Operand::Const(bytes) = bytes.into_operand() {
            return Self { offset: self.offset + bytes as i64, ..self };
        }
        Self { base: k.compute(PureOp::AddU32, &[self.base.operand(), bytes.into_operand()]), ..self }
    }

    /// The same address in the shared memory of another CTA of the cluster.
    #[must_use]
    #[track_caller]
    pub fn of_cta(self, rank: impl IntoOperand<u32>) -> Self {
        let k = self.base.builder();
        Self { base: k.map_to_cta(self.base, rank), space: Space::Cluster, ..self }
    }
}

impl<'k, T: Scalar, A: Scalar> Pointer<'k, T, A> {
    /// A pointer to an address in global memory or in the CTA's own shared memory.
    pub fn new(base: Value<'k, A>) -> Self {
        let space = if A::CLASS == Class::B64 { Space::Global } else { Space::Shared };
        Self { base, offset: 0, space, ty: PhantomData }
    }

    /// Element `index`. Byte offsets in global memory have 64 bits, so any `u32` is allowed.
    #[must_use]
    #[track_caller]
    pub fn at(self, index: impl IntoOperand<u32>) -> Self {
        let (k, index, size) = (self.base.builder(), index.into_operand(), T::CLASS.bytes() as u64);
        if let Operand::Const(index) = index {
            return Self { offset: self.offset + (index * size) as i64, ..self };
        }
        let op = if A::CLASS == Class::B64 { PureOp::MadWideU32 } else { PureOp::MadU32 };
        Self { base: k.compute(op, &[index, Operand::Const(size), self.base.operand()]), ..self }
    }

    /// The address as an integer.
    #[track_caller]
    pub fn address(self) -> Value<'k, A> {
        let k = self.base.builder();
        let op = if A::CLASS == Class::B64 { PureOp::AddU64 } else { PureOp::AddU32 };
        k.compute(op, &[self.base.operand(), Operand::Const(self.offset.cast_unsigned())])
    }

    /// The same address with another element type.
    #[must_use]
    pub fn cast<U: Scalar>(self) -> Pointer<'k, U, A> {
        Pointer { base: self.base, offset: self.offset, space: self.space, ty: PhantomData }
    }

    /// Element `index`, a recording-time constant that becomes the instruction's offset.
    #[must_use]
    pub fn plus(self, index: usize) -> Self {
        Self { offset: self.offset + (index * T::CLASS.bytes()) as i64, ..self }
    }

    /// Address and offset as instruction operands.
    pub(super) fn operands(self) -> [Operand; 2] {
        [self.base.operand(), Operand::Const(self.offset.cast_unsigned())]
    }

    pub(super) fn builder(self) -> &'k Builder {
        self.base.builder()
    }

    fn emit(self, op: MemoryOp, values: &[Operand], at: &'static std::panic::Location<'static>) {
        let operands = [&self.operands()[..], values].concat();
        self.builder().0.borrow_mut().push(Op::Memory(op), Vec::new(), &operands, at);
    }

    /// Loads a byte, zero-extended.
    #[track_caller]
    pub fn load_u8(self) -> Value<'k, u32> {
        let [value] = self
            .builder()
            .effect(Op::Memory(MemoryOp::Load(self.space, Element::U8, 1, Access::Weak)), &self.operands());
        value
    }

    /// Stores the low byte.
    #[track_caller]
    pub fn store_u8(self, value: impl IntoOperand<u32>) {
        let op = MemoryOp::Store(self.space, Element::U8, 1, Access::Weak);
        self.emit(op, &[value.into_operand()], std::panic::Location::caller());
    }
}

impl<'k, T: Stored, A: Scalar> Pointer<'k, T, A> {
    /// Loads the element.
    #[track_caller]
    pub fn load(self) -> Value<'k, T> {
        let [value] = self.load_vector_with(Access::Weak);
        value
    }

    /// Loads the element with the given access mode.
    #[track_caller]
    pub fn load_with(self, access: Access) -> Value<'k, T> {
        let [value] = self.load_vector_with(access);
        value
    }

    /// Loads 2 or 4 elements at once; the address must be aligned to the vector.
    #[track_caller]
    pub fn load_vector<const N: usize>(self) -> [Value<'k, T>; N] {
        self.load_vector_with(Access::Weak)
    }

    /// Like [`Pointer::load_vector`], with the given access mode.
    #[track_caller]
    pub fn load_vector_with<const N: usize>(self, access: Access) -> [Value<'k, T>; N] {
        const { assert!(N == 1 || N == 2 || N == 4, "vectors have 1, 2 or 4 elements") };
        self.builder().effect(Op::Memory(MemoryOp::Load(self.space, T::ELEMENT, N, access)), &self.operands())
    }

    /// Stores the element.
    #[track_caller]
    pub fn store(self, value: impl IntoOperand<T>) {
        self.store_with(value, Access::Weak);
    }

    /// Stores the element with the given access mode.
    #[track_caller]
    pub fn store_with(self, value: impl IntoOperand<T>, access: Access) {
        let op = MemoryOp::Store(self.space, T::ELEMENT, 1, access);
        self.emit(op, &[value.into_operand()], std::panic::Location::caller());
    }

    /// Stores 2 or 4 elements at once; the address must be aligned to the vector.
    #[track_caller]
    pub fn store_vector<const N: usize>(self, values: [Value<'k, T>; N]) {
        const { assert!(N == 2 || N == 4, "vectors have 2 or 4 elements") };
        let op = MemoryOp::Store(self.space, T::ELEMENT, N, Access::Weak);
        // vector operands must be registers
        let values = values.map(|value| self.builder().in_register(value));
        self.emit(op, &values.map(|value| value.operand), std::panic::Location::caller());
    }

    /// Applies `op` to the element and returns the old value.
    #[track_caller]
    pub fn atomic(
        self,
        op: AtomicOp,
        value: impl IntoOperand<T>,
        order: Order,
        scope: Scope,
    ) -> Value<'k, T> {
        let op = Op::Memory(MemoryOp::Atomic(self.space, op, order, scope));
        let [old] = self.builder().effect(op, &[&self.operands()[..], &[value.into_operand()]].concat());
        old
    }

    /// Applies `op` to the element.
    #[track_caller]
    pub fn reduce(self, op: AtomicOp, value: impl IntoOperand<T>, order: Order, scope: Scope) {
        let op = MemoryOp::Reduce(self.space, op, order, scope);
        self.emit(op, &[value.into_operand()], std::panic::Location::caller());
    }
}

impl<T: Scalar> Global<'_, T> {
    /// Prefetches the cache line into L2.
    #[track_caller]
    pub fn prefetch(self) {
        self.emit(MemoryOp::Prefetch, &[], std::panic::Location::caller());
    }
}

/// An L2 cache policy of asynchronous copies.
#[derive(Debug, Clone, Copy)]
pub struct CachePolicy<'k>(Value<'k, u64>);

impl CachePolicy<'_> {
    /// The kind of the last operand of a copy, and the operand.
    pub(super) fn operand(of: Option<Self>) -> (Policy, Vec<Operand>) {
        of.map_or((Policy::Default, Vec::new()), |Self(policy)| (Policy::Operand, vec![policy.operand]))
    }
}

impl Builder {
    /// Creates an L2 cache policy.
    #[track_caller]
    pub fn cache_policy(&self, eviction: Eviction) -> CachePolicy<'_> {
        let [policy] = self.effect(Op::Memory(MemoryOp::CachePolicy(eviction)), &[]);
        CachePolicy(policy)
    }

    /// Prefetches a tensor map.
    #[track_caller]
    pub fn prefetch_tensor_map(&self, map: Value<'_, u64>) {
        self.emit(Op::Memory(MemoryOp::PrefetchTensorMap), &[map.operand, Operand::Const(0)]);
    }

    /// The value in a register, for instructions without constant operands.
    #[track_caller]
    pub(super) fn in_register<'k, T: Scalar>(&'k self, value: Value<'k, T>) -> Value<'k, T> {
        match value.operand {
            Operand::Reg(_) => value,
            Operand::Const(_) => {
                let [register] = self.effect(Op::Move(T::CLASS), &[value.operand]);
                register
            }
        }
    }
}
