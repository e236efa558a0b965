//! Steps that the attention kernels share.

pub(crate) mod cta;
pub(crate) mod dequant;
pub(crate) mod epilogue;
pub(crate) mod epilogue_hooks;
pub(crate) mod fragments;
pub(crate) mod layout;
pub mod merge;
pub(crate) mod nonfinite;
pub(crate) mod page_lookup;
pub(crate) mod page_scales;
pub(crate) mod query_row;
pub(crate) mod row_hooks;
pub(crate) mod row_table;
pub(crate) mod softmax;
pub(crate) mod visible;
