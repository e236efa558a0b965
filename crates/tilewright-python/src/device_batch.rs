//! Batches in device memory: their arrays, and the constants of their plans.

use crate::{backend::AnyBackend, integers::IndexArg};
use pyo3::prelude::*;
use std::sync::Arc;
use tilewright::{
    DeviceMemory, Error, Result,
    attention::{DeviceBatch, DevicePages},
};

const OPERATOR: &str = "attention.plan_on_device";

/// The arrays of a batch. Rows are bounds or a number per request; keys are lists of pages, or a block table with its row length.
/// Arrays on the host are copied to the device.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct DeviceBatchFields {
    qo_indptr: Option<IndexArg>,
    qo_len: Option<usize>,
    kv_indptr: Option<IndexArg>,
    last_page_len: Option<IndexArg>,
    seq_lens: Option<IndexArg>,
    pages: IndexArg,
    columns: usize,
    page_size: usize,
}

/// Arrays that depend on the number of requests and of their rows only, so that a plan writes them once.
pub(crate) struct BatchConstants {
    requests: usize,
    qo_len: Option<usize>,
    num_requests: Arc<DeviceMemory>,
    qo_indptr: Option<Arc<DeviceMemory>>,
}

impl BatchConstants {
    fn new(backend: &AnyBackend, requests: usize, qo_len: Option<usize>) -> Result<Self> {
        let narrow = |count: usize| {
            i32::try_from(count)
                .map_err(|_| Error::new(OPERATOR, format!("{count} query rows, the most is {}", i32::MAX)))
        };
        let bounds = |len: usize| -> Result<_> {
            let bounds = (0..=requests).map(|r| narrow(r.saturating_mul(len)));
            upload(backend, &bounds.collect::<Result<Vec<i32>>>()?)
        };
        let num_requests = upload(backend, &[narrow(requests)?])?;
        Ok(Self { requests, qo_len, num_requests, qo_indptr: qo_len.map(bounds).transpose()? })
    }
}

impl DeviceBatchFields {
    pub(crate) fn page_size(&self) -> usize {
        self.page_size
    }

    /// The batch. Constants of an equal number of requests and rows are reused.
    pub(crate) fn batch(
        self,
        backend: &AnyBackend,
        constants: &mut Option<BatchConstants>,
    ) -> Result<DeviceBatch> {
        let array = |name: &str, array: IndexArg| array.into_memory(backend, OPERATOR, name).map(Arc::new);
        let missing = |name: &str| Error::new(OPERATOR, format!("{name} is None, expected an array"));
        let lengths = self.seq_lens.as_ref().or(self.last_page_len.as_ref());
        let requests = lengths.ok_or_else(|| missing("last_page_len"))?.len();
        let known =
            constants.take().filter(|known| (known.requests, known.qo_len) == (requests, self.qo_len));
        let known = match known {
            Some(known) => known,
            None => BatchConstants::new(backend, requests, self.qo_len)?,
        };
        let known = constants.insert(known);
        let qo_indptr = match (self.qo_indptr, &known.qo_indptr) {
            (Some(bounds), _) => array("qo_indptr", bounds)?,
            (None, Some(bounds)) => bounds.clone(),
            (None, None) => return Err(missing("qo_indptr")),
        };
        let pages = match self.seq_lens {
            Some(seq_lens) => DevicePages::BlockTable {
                seq_lens: array("seq_lens", seq_lens)?,
                block_tables: array("block_tables", self.pages)?,
                columns: self.columns,
            },
            None => DevicePages::Lists {
                kv_indptr: array("kv_indptr", self.kv_indptr.ok_or_else(|| missing("kv_indptr"))?)?,
                last_page_len: array(
                    "last_page_len",
                    self.last_page_len.ok_or_else(|| missing("last_page_len"))?,
                )?,
                indices: array("indices", self.pages)?,
            },
        };
        Ok(DeviceBatch { num_requests: known.num_requests.clone(), qo_indptr, pages })
    }
}

fn upload(backend: &AnyBackend, values: &[i32]) -> Result<Arc<DeviceMemory>> {
    backend.upload(values).map(Arc::new)
}
