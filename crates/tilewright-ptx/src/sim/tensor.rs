//! Tensor maps: the bytes that a TMA copy of a box moves.
//!
//! A box is dense in shared memory, innermost dimension first, and swizzled by address. Coordinates may be outside the tensor:
//! loads fill such elements with zeros.

/// The swizzle of 16-byte units in shared memory: address bits from 4 up are XORed with those from 7 up.
/// (PTX ISA, "Swizzling Modes": `Swizzle<3,4,3>` of CuTe.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// No swizzle.
    None,
    /// Span of 128 bytes: bits 4 to 6 with bits 7 to 9; repeats every 1024 bytes.
    B128,
}

impl Swizzle {
    /// The span in bytes, if swizzled.
    pub fn span(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::B128 => Some(128),
        }
    }

    /// The swizzled address of a shared address. The function is its own inverse.
    pub fn apply(self, address: u32) -> u32 {
        match self {
            Self::None => address,
            Self::B128 => address ^ (address >> 7 & 7) << 4,
        }
    }
}

/// A tensor in global memory, and the shape of the box that one copy moves. Dimensions are innermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMap {
    /// Bytes per element.
    pub element_bytes: u32,
    /// Global address of the first element.
    pub address: u64,
    /// Elements per dimension; 1 to 5 dimensions.
    pub dims: Vec<u64>,
    /// Byte strides of all dimensions except the innermost, which is dense.
    pub strides: Vec<u64>,
    /// Elements of the box per dimension.
    pub box_dims: Vec<u32>,
    /// The swizzle of the box in shared memory.
    pub swizzle: Swizzle,
}

/// A segment of a box: contiguous bytes within an aligned 16-byte unit of shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoxSegment {
    /// The shared address.
    pub shared: u32,
    /// The global address; none outside the tensor.
    pub global: Option<u64>,
    /// The length in bytes.
    pub bytes: u32,
}

impl TensorMap {
    /// The alignment of a box in shared memory, in bytes.
    pub const SHARED_ALIGN: u32 = 128;

    /// Checks the driver's rules (`cuTensorMapEncodeTiled`, no interleaving, element strides 1).
    ///
    /// # Errors
    /// The first violated rule. One rule is stricter than the driver: with a swizzle, the innermost box dimension must fill the
    /// span, because the gap between shorter rows is undocumented.
    pub fn check(&self) -> Result<(), String> {
        self.check_tensor().and_then(|()| self.check_box()).map_err(|error| format!("tensor map: {error}"))
    }

    fn check_tensor(&self) -> Result<(), String> {
        let (rank, strides) = (self.dims.len(), self.strides.len());
        if !matches!(self.element_bytes, 1 | 2 | 4 | 8) {
            return Err(format!("elements of {} bytes; they have 1, 2, 4 or 8", self.element_bytes));
        }
        if !(1..=5).contains(&rank) {
            return Err(format!("{rank} dimensions; there are 1 to 5"));
        }
        if strides != rank - 1 {
            return Err(format!("{strides} strides for {rank} dimensions; all but the innermost have one"));
        }
        if !self.address.is_multiple_of(16) {
            return Err(format!("address {:#x} is not a multiple of 16", self.address));
        }
        for (at, &dim) in self.dims.iter().enumerate() {
            if !(1..=1 << 32).contains(&dim) {
                return Err(format!("dims[{at}] = {dim} is not in 1..=2^32"));
            }
        }
        for (at, &stride) in self.strides.iter().enumerate() {
            if !stride.is_multiple_of(16) || stride >= 1 << 40 {
                return Err(format!("strides[{at}] = {stride} is not a multiple of 16 below 2^40"));
            }
        }
        let beyond = |(dim, stride): (&u64, &u64)| u128::from(dim - 1) * u128::from(*stride);
        let last: u128 = self.dims[1..].iter().zip(&self.strides).map(beyond).sum();
        let line = u128::from(self.dims[0]) * u128::from(self.element_bytes);
        if u128::from(self.address) + last + line > 1 << 63 {
            return Err("the tensor's end is beyond 2^63".into());
        }
        Ok(())
    }

    fn check_box(&self) -> Result<(), String> {
        let (rank, sides) = (self.dims.len(), self.box_dims.len());
        if sides != rank {
            return Err(format!("{sides} box dimensions for {rank} dimensions"));
        }
        for (at, &side) in self.box_dims.iter().enumerate() {
            if !(1..=256).contains(&side) {
                return Err(format!("box_dims[{at}] = {side} is not in 1..=256"));
            }
        }
        let inner = self.box_dims[0] * self.element_bytes;
        if !inner.is_multiple_of(16) {
            return Err(format!("the box's innermost {inner} bytes are not a multiple of 16"));
        }
        let bytes = self.box_dims.iter().map(|&side| u64::from(side)).product::<u64>()
            * u64::from(self.element_bytes);
        if bytes > 1 << 18 {
            return Err(format!("a box of {bytes} bytes is more than shared memory's addresses, 2^18"));
        }
        match self.swizzle.span() {
            Some(span) if inner > span => {
                Err(format!("the box's innermost {inner} bytes exceed the swizzle's {span}"))
            }
            Some(span) if inner < span => Err(format!(
                "the box's innermost {inner} bytes do not fill the swizzle's {span}, which is not simulated"
            )),
            _ => Ok(()),
        }
    }

    /// Bytes of a box in shared memory. A load signals this many bytes to its mbarrier, even if the box exceeds the tensor.
    pub fn box_bytes(&self) -> u32 {
        self.box_dims.iter().product::<u32>() * self.element_bytes
    }

    /// The segments of the box at `coordinates` (innermost first) and shared address `shared`, a multiple of
    /// [`SHARED_ALIGN`](Self::SHARED_ALIGN). They are in the order of the unswizzled box.
    ///
    /// # Panics
    /// When the number of coordinates differs from the dimensions. The map must pass [`check`](Self::check).
    pub fn segments(&self, coordinates: &[i32], shared: u32) -> Vec<BoxSegment> {
        assert_eq!(coordinates.len(), self.dims.len(), "coordinates of a tensor copy");
        let inner = self.box_dims[0] * self.element_bytes;
        let mut segments = Vec::with_capacity((self.box_bytes() / 16) as usize);
        for row in 0..self.box_bytes() / inner {
            let line = self.row_address(coordinates, row);
            for piece in (0..inner).step_by(16) {
                let address = self.swizzle.apply(shared.saturating_add(row * inner + piece));
                segments.extend(self.split_unit(coordinates[0], piece, line, address));
            }
        }
        segments
    }

    /// The global address of a box row's tensor line, if it is inside the tensor.
    fn row_address(&self, coordinates: &[i32], mut row: u32) -> Option<u64> {
        let mut address = self.address;
        for (at, &stride) in self.strides.iter().enumerate() {
            let side = self.box_dims[at + 1];
            let index = i64::from(coordinates[at + 1]) + i64::from(row % side);
            row /= side;
            let index = u64::try_from(index).ok().filter(|&index| index < self.dims[at + 1])?;
            address += index * stride;
        }
        Some(address)
    }

    /// The segments of a 16-byte unit, split at the tensor's edges. `piece` is its byte offset in the row, `first` the row's
    /// coordinate.
    fn split_unit(
        &self,
        first: i32,
        piece: u32,
        line: Option<u64>,
        shared: u32,
    ) -> impl Iterator<Item = BoxSegment> {
        let begin = i64::from(first) * i64::from(self.element_bytes) + i64::from(piece);
        let end = if line.is_some() {
            self.dims[0].cast_signed() * i64::from(self.element_bytes)
        } else {
            i64::MIN / 2
        };
        let low = (-begin).clamp(0, 16);
        let high = (end - begin).clamp(low, 16);
        let part = move |(from, to, global): (i64, i64, Option<u64>)| {
            (from < to).then_some(BoxSegment {
                shared: shared + from as u32,
                global,
                bytes: (to - from) as u32,
            })
        };
        let inside = line.map(|line| line.wrapping_add_signed(begin + low));
        [(0, low, None), (low, high, inside), (high, 16, None)].into_iter().filter_map(part)
    }
}
