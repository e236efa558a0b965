//! The KV cache: layouts, page tables, scales, and appending tokens.

pub mod append;
mod append_plan;
mod block_sparse;
mod copy;
pub(crate) mod layout;
pub mod mla;
mod page_list;
mod page_table;
pub mod rope_append;
mod scales;
mod slot_arrays;
mod slots;

pub use append_plan::AppendPlan;
pub use block_sparse::{BlockSparse, VariableBlockSparse};
pub(crate) use copy::copy_pages_on_host;
pub use copy::{PageCopies, copy_pages};
pub use layout::{KvCache, KvCacheMut, KvLayout, KvStrides};
pub use page_list::{DevicePart, PageIndices, PageList};
pub use page_table::{PageTable, get_seq_lens};
pub use scales::{KvScales, QuantizedCache, Scale, ScaleMut};
pub use slot_arrays::{AppendSlots, SlotArrays};
pub use slots::{PageSlots, Slot, Slots};
