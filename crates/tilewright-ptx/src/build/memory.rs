//! Arrays in global and shared memory: an address that knows what it points to, and a constant offset that costs nothing.

use super::{Builder, Of, Value};
use crate::{
    ir::Operand,
    isa::{
        Op,
        memory::{Access, AtomicOp, Element, Memory, Order, Scope, Space},
        pure::Pure,
        types::{Bf16x2, Class, E4m3x2, E5m2x2, F16x2, Scalar},
    },
};
use half::{bf16, f16};
use std::{fmt, marker::PhantomData};

/// Types that lie in memory as in registers.
pub trait Stored: Scalar {
    /// How they are loaded and stored.
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
    u16: B16, i16: B16, f16: B16, bf16: B16, E4m3x2: B16, E5m2x2: B16, u32: B32, i32: B32, f32: B32, F16x2: B32, Bf16x2: B32,
    u64: B64, i64: B64, f64: B64
);

/// The address of elements `T`; `A` is the type of addresses, which says in which memory.
pub struct Pointer<'k, T, A> {
    base: Value<'k, A>,
    /// Bytes beyond it.
    offset: i64,
    space: Space,
    ty: PhantomData<T>,
}

/// An address in global memory.
pub type Global<'k, T> = Pointer<'k, T, u64>;
/// An address in shared memory.
pub type Shared<'k, T> = Pointer<'k, T, u32>;

impl<T, A> Clone for Pointer<'_, T, A> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, A> Copy for Pointer<'_, T, A> {}

impl<T, A> fmt::Debug for Pointer<'_, T, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} + {} ({:?})", self.base, self.offset, self.space)
    }
}

impl<'k, T: Scalar> Global<'k, T> {
    /// Elements at an address.
    pub fn new(base: Value<'k, u64>) -> Self {
        Self { base, offset: 0, space: Space::Global, ty: PhantomData }
    }

    /// Element `index`, which may be any u32: addresses have 64 bits.
    #[must_use]
    #[track_caller]
    pub fn at(self, index: impl Of<u32>) -> Self {
        let k = self.base.builder();
        if let Operand::Const(index) = index.of() {
            return Self { offset: self.offset + (index as usize * T::CLASS.bytes()) as i64, ..self };
        }
        let size = Operand::Const(T::CLASS.bytes() as u64);
        Self { base: k.compute(Pure::MadWideU32, &[index.of(), size, self.base.operand()]), ..self }
    }

    /// Element `index` of an array that may have more than 2^32.
    #[must_use]
    #[track_caller]
    pub fn at_wide(self, index: impl Of<u64>) -> Self {
        let k = self.base.builder();
        let size = Operand::Const(T::CLASS.bytes() as u64);
        Self { base: k.compute(Pure::MadU64, &[index.of(), size, self.base.operand()]), ..self }
    }
}

impl<'k, T: Scalar> Shared<'k, T> {
    /// Elements at an address of the CTA's own shared memory.
    pub fn new(base: Value<'k, u32>) -> Self {
        Self { base, offset: 0, space: Space::Shared, ty: PhantomData }
    }

    /// Element `index`.
    #[must_use]
    #[track_caller]
    pub fn at(self, index: impl Of<u32>) -> Self {
        let k = self.base.builder();
        let size = T::CLASS.bytes() as u64;
        if let Operand::Const(index) = index.of() {
            return Self { offset: self.offset + (index * size) as i64, ..self };
        }
        Self {
            base: k.compute(Pure::MadU32, &[index.of(), Operand::Const(size), self.base.operand()]),
            ..self
        }
    }

    /// So many bytes further on.
    #[must_use]
    #[track_caller]
    pub fn byte(self, bytes: impl Of<u32>) -> Self {
        let k = self.base.builder();
        if let Operand::Const(bytes) = bytes.of() {
            return Self { offset: self.offset + bytes as i64, ..self };
        }
        Self { base: k.compute(Pure::AddU32, &[self.base.operand(), bytes.of()]), ..self }
    }

    /// The same place in the shared memory of another CTA of the cluster.
    #[must_use]
    #[track_caller]
    pub fn of_cta(self, rank: impl Of<u32>) -> Self {
        let k = self.base.builder();
        Self { base: k.map_to_cta(self.base, rank), space: Space::Cluster, ..self }
    }
}

impl<'k, T: Scalar, A: Scalar> Pointer<'k, T, A> {
    /// The address as a number.
    #[track_caller]
    pub fn address(self) -> Value<'k, A> {
        let k = self.base.builder();
        let op = if A::CLASS == Class::B64 { Pure::AddU64 } else { Pure::AddU32 };
        k.compute(op, &[self.base.operand(), Operand::Const(self.offset.cast_unsigned())])
    }

    /// The same address, of other elements.
    #[must_use]
    pub fn cast<U: Scalar>(self) -> Pointer<'k, U, A> {
        Pointer { base: self.base, offset: self.offset, space: self.space, ty: PhantomData }
    }

    /// Element `index`, known while recording: an offset in the instruction.
    #[must_use]
    pub fn plus(self, index: usize) -> Self {
        Self { offset: self.offset + (index * T::CLASS.bytes()) as i64, ..self }
    }

    /// Address and offset, as instructions take them.
    pub(super) fn operands(self) -> [Operand; 2] {
        [self.base.operand(), Operand::Const(self.offset.cast_unsigned())]
    }

    pub(super) fn builder(self) -> &'k Builder {
        self.base.builder()
    }

    fn act(self, op: Memory, values: &[Operand], at: &'static std::panic::Location<'static>) {
        let operands = [&self.operands()[..], values].concat();
        self.builder().0.borrow_mut().push(Op::Memory(op), Vec::new(), &operands, at);
    }

    /// A byte, with zeros above it.
    #[track_caller]
    pub fn load_u8(self) -> Value<'k, u32> {
        let [value] = self
            .builder()
            .effect(Op::Memory(Memory::Load(self.space, Element::U8, 1, Access::Weak)), &self.operands());
        value
    }

    /// Stores the low byte.
    #[track_caller]
    pub fn store_u8(self, value: impl Of<u32>) {
        let op = Memory::Store(self.space, Element::U8, 1, Access::Weak);
        self.act(op, &[value.of()], std::panic::Location::caller());
    }
}

impl<'k, T: Stored, A: Scalar> Pointer<'k, T, A> {
    /// The element.
    #[track_caller]
    pub fn load(self) -> Value<'k, T> {
        let [value] = self.load_vector_with(Access::Weak);
        value
    }

    /// The element, read as `access` says.
    #[track_caller]
    pub fn load_with(self, access: Access) -> Value<'k, T> {
        let [value] = self.load_vector_with(access);
        value
    }

    /// 2 or 4 elements at once; the address is aligned to all of them.
    #[track_caller]
    pub fn load_vector<const N: usize>(self) -> [Value<'k, T>; N] {
        self.load_vector_with(Access::Weak)
    }

    /// The same, read as `access` says.
    #[track_caller]
    pub fn load_vector_with<const N: usize>(self, access: Access) -> [Value<'k, T>; N] {
        const { assert!(N == 1 || N == 2 || N == 4, "vectors have 1, 2 or 4 elements") };
        self.builder().effect(Op::Memory(Memory::Load(self.space, T::ELEMENT, N, access)), &self.operands())
    }

    /// Stores the element.
    #[track_caller]
    pub fn store(self, value: impl Of<T>) {
        self.store_with(value, Access::Weak);
    }

    /// Stores it as `access` says.
    #[track_caller]
    pub fn store_with(self, value: impl Of<T>, access: Access) {
        let op = Memory::Store(self.space, T::ELEMENT, 1, access);
        self.act(op, &[value.of()], std::panic::Location::caller());
    }

    /// Stores 2 or 4 elements at once; the address is aligned to all of them.
    #[track_caller]
    pub fn store_vector<const N: usize>(self, values: [Value<'k, T>; N]) {
        const { assert!(N == 2 || N == 4, "vectors have 2 or 4 elements") };
        let op = Memory::Store(self.space, T::ELEMENT, N, Access::Weak);
        // vectors are written as registers
        let values = values.map(|value| self.builder().in_register(value));
        self.act(op, &values.map(|value| value.is), std::panic::Location::caller());
    }

    /// Changes the element as `op` says, and gives what it was.
    #[track_caller]
    pub fn atomic(self, op: AtomicOp, value: impl Of<T>, (order, scope): (Order, Scope)) -> Value<'k, T> {
        let operands = [&self.operands()[..], &[value.of()]].concat();
        let [old] =
            self.builder().effect(Op::Memory(Memory::Atomic(self.space, op, order, scope)), &operands);
        old
    }

    /// `value` where the element is `expected`; gives what it was.
    #[track_caller]
    pub fn compare_and_swap(
        self,
        expected: impl Of<T>,
        value: impl Of<T>,
        (order, scope): (Order, Scope),
    ) -> Value<'k, T> {
        let op = if T::CLASS == Class::B64 { AtomicOp::CasU64 } else { AtomicOp::Cas };
        let operands = [&self.operands()[..], &[expected.of(), value.of()]].concat();
        let [old] =
            self.builder().effect(Op::Memory(Memory::Atomic(self.space, op, order, scope)), &operands);
        old
    }

    /// Changes the element as `op` says.
    #[track_caller]
    pub fn reduce(self, op: AtomicOp, value: impl Of<T>, (order, scope): (Order, Scope)) {
        self.act(Memory::Reduce(self.space, op, order, scope), &[value.of()], std::panic::Location::caller());
    }
}

impl<T: Scalar> Global<'_, T> {
    /// Asks for its line in L2.
    #[track_caller]
    pub fn prefetch(self) {
        self.act(Memory::Prefetch, &[], std::panic::Location::caller());
    }
}

impl Builder {
    /// Asks for a tensor map.
    #[track_caller]
    pub fn prefetch_tensor_map(&self, map: Value<'_, u64>) {
        self.act(Op::Memory(Memory::PrefetchTensorMap), &[map.is, Operand::Const(0)]);
    }

    /// The value in a register, where instructions take no constant.
    #[track_caller]
    pub(super) fn in_register<'k, T: Scalar>(&'k self, value: Value<'k, T>) -> Value<'k, T> {
        match value.is {
            Operand::Reg(_) => value,
            Operand::Const(_) => {
                let [register] = self.effect(Op::Move(T::CLASS), &[value.is]);
                register
            }
        }
    }
}
