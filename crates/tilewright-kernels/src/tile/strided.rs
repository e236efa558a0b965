//! Rows with two outer axes of any strides: host description and device pointers.

use super::Elements;
use crate::params::Param;
use tilewright::Dtype;
use tilewright_ptx::{Arg, Builder, Value};

/// Rows of a tensor `[tokens, heads, ..]` with a dense last axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strided {
    /// Byte address of the first element.
    pub address: u64,
    /// Token and head strides, in elements.
    pub strides: [u64; 2],
}

impl Strided {
    /// Quantities that must be multiples of a chunk width ([`super::chunk::width`]).
    pub(crate) fn alignment(self, dtype: Dtype) -> [u64; 3] {
        // an address that is not a multiple of the element size rules out every width but 1
        let size = dtype.size() as u64;
        let address = if self.address.is_multiple_of(size) { self.address / size } else { 1 };
        [address, self.strides[0], self.strides[1]]
    }

    /// Address and strides in the order of `StridedRows::param`.
    pub fn args(self) -> [Arg; 3] {
        [Arg::U64(self.address), Arg::U64(self.strides[0]), Arg::U64(self.strides[1])]
    }
}

impl Param for Strided {
    type Host = Self;
    type Regs<'k> = StridedRows<'k>;
    type Config = Dtype;

    /// Declares three parameters: an address, `_token_stride` and `_head_stride`.
    #[track_caller]
    fn declare<'k>(k: &'k Builder, name: &str, dtype: Dtype) -> StridedRows<'k> {
        StridedRows::param(k, name, dtype)
    }

    fn push(host: &Self, _: Dtype, args: &mut Vec<Arg>) {
        args.extend(host.args());
    }
}

/// Address and stride of elements, whose dtype is the configuration.
impl Param for (u64, u64) {
    type Host = Self;
    type Regs<'k> = (Elements<'k>, Value<'k, u64>);
    type Config = Dtype;

    #[track_caller]
    fn declare<'k>(k: &'k Builder, name: &str, dtype: Dtype) -> Self::Regs<'k> {
        (Elements::param(k, name, dtype), k.param(&format!("{name}_stride")))
    }

    fn push(&(address, stride): &Self, _: Dtype, args: &mut Vec<Arg>) {
        args.extend([address, stride].map(Arg::U64));
    }
}

/// [`Strided`] in registers.
#[derive(Debug, Clone, Copy)]
pub struct StridedRows<'k> {
    base: Elements<'k>,
    strides: [Value<'k, u64>; 2],
}

impl<'k> StridedRows<'k> {
    /// Declares three parameters: an address, `_token_stride` and `_head_stride`.
    #[track_caller]
    pub fn param(k: &'k Builder, name: &str, dtype: Dtype) -> Self {
        let base = Elements::param(k, name, dtype);
        Self { base, strides: ["token", "head"].map(|axis| k.param(&format!("{name}_{axis}_stride"))) }
    }

    /// First element of a row.
    #[track_caller]
    pub fn row(self, token: Value<'k, u32>, head: Value<'k, u32>) -> Elements<'k> {
        self.base.at_wide(token.to_u64() * self.strides[0] + head.to_u64() * self.strides[1])
    }

    /// Selects `self` if `condition` holds, otherwise `other`.
    #[must_use]
    #[track_caller]
    pub(crate) fn or_else(self, condition: Value<'k, bool>, other: Self, dtype: Dtype) -> Self {
        let select = |a, b| condition.select::<u64>(a, b);
        Self {
            base: Elements::new(select(self.base.address(), other.base.address()), dtype),
            strides: [0, 1].map(|i| select(self.strides[i], other.strides[i])),
        }
    }
}
