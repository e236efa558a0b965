"""Batches whose lengths are on a GPU, which plans them: nothing is copied to the host, and no call waits."""

from ._core import Error
from ._tensors import _torch, device_indices, on_host

__all__ = ["BlockTable", "DeviceBatch", "page_bounds", "pages_on_device"]

#: The errors that a GPU finds in lengths, by their bits.
REFUSALS = {
    1: "the number of requests exceeds the capacity",
    2: "qo_indptr does not start at 0, decreases, or exceeds the capacity of rows",
    4: "kv_indptr decreases or exceeds the capacity of pages",
    8: "last_page_len is not in 1..=page_size, or a request has more keys than the capacity or its row of the block table",
}


class BlockTable:
    """The pages of each request as rows: ``block_tables`` ``[num_requests, max_pages]`` page ids, of which row ``r`` begins with
    those of request ``r``; ``seq_lens`` ``[num_requests]`` tokens of each request. int32; other integers are converted."""

    __slots__ = ("block_tables", "page_size", "seq_lens")

    def __init__(self, block_tables, seq_lens, page_size: int):
        if len(block_tables.shape) != 2 or block_tables.shape[0] != len(seq_lens):
            raise Error(f"attention.block_table: block_tables has shape {tuple(block_tables.shape)}, expected "
                        f"[{len(seq_lens)}, max_pages] for seq_lens of {len(seq_lens)} requests")
        self.block_tables = block_tables
        self.seq_lens = seq_lens
        self.page_size = page_size


class DeviceBatch:
    """The requests of one step with arrays on a GPU.

    ``qo_indptr`` is the number of query rows of every request, or bounds ``[num_requests + 1]``. ``table`` is a
    :class:`~tilewright.PageTable`, whose ``indptr`` may start above 0 and whose requests without pages may have any
    ``last_page_len``, or a :class:`BlockTable`. A plan has the rows of its capacity, and its split is balanced. Contents are
    checked on the GPU, which plans nothing if they are invalid: see :meth:`Attention.check_plan`. The CPU plans and checks them
    as :class:`~tilewright.Batch`. :meth:`Plan.explain` does not know the lengths on a GPU.
    """

    __slots__ = ("_qo_indptr", "_table")

    def __init__(self, qo_indptr, table):
        self._qo_indptr = qo_indptr
        self._table = table

    @property
    def _num_requests(self) -> int:
        table = self._table
        return len(table.seq_lens if isinstance(table, BlockTable) else table.last_page_len)

    def _limits(self) -> dict:
        """The capacity of a batch with an equal number of rows per request."""
        requests, rows = self._num_requests, self._qo_indptr
        if not isinstance(rows, int):
            raise Error("attention.plan: qo_indptr is on the device, expected capacity or a number of rows per request")
        pages = 0 if isinstance(self._table, BlockTable) else len(self._table.indices)
        return {"requests": requests, "rows": requests * rows, "pages": pages, "qo_len": rows, "kv_len": None, "levels": 0,
                "mask_bytes": 0}

    def _fields(self) -> dict:
        table, rows = self._table, self._qo_indptr
        is_uniform, is_block_table = isinstance(rows, int), isinstance(table, BlockTable)
        fields = {
            "qo_indptr": None if is_uniform else device_indices(rows),
            "qo_len": rows if is_uniform else None,
            "kv_indptr": None if is_block_table else device_indices(table.indptr),
            "last_page_len": None if is_block_table else device_indices(table.last_page_len),
            "seq_lens": device_indices(table.seq_lens) if is_block_table else None,
            "pages": device_indices(table.block_tables).reshape(-1) if is_block_table else device_indices(table.indices),
            "columns": table.block_tables.shape[1] if is_block_table else 0,
            "page_size": table.page_size,
        }
        return fields

    def _host_arrays(self) -> tuple:
        """Bounds of the rows, and the arrays of a page table, on the host."""
        import numpy

        table, rows = self._table, self._qo_indptr
        if isinstance(rows, int):
            rows = numpy.arange(self._num_requests + 1, dtype=numpy.int32) * numpy.int32(rows)
        if not isinstance(table, BlockTable):
            bounds, last = (numpy.asarray(on_host(x)) for x in (table.indptr, table.last_page_len))
            indices = on_host(table.indices)[int(bounds[0]):int(bounds[-1])]
            return rows, (bounds - bounds[0], indices, numpy.where(bounds[1:] == bounds[:-1], 0, last), table.page_size)
        pages, lens = numpy.asarray(on_host(table.block_tables)), numpy.asarray(on_host(table.seq_lens))
        limit = pages.shape[1] * table.page_size
        for request, tokens in enumerate(lens.tolist()):
            if not 0 <= tokens <= limit:
                raise Error(f"attention.plan: request {request}: seq_lens = {tokens} is not in 0..={limit}")
        indptr, last = page_bounds(lens, table.page_size)
        used = numpy.arange(pages.shape[1]) < numpy.diff(indptr)[:, None]
        return rows, (indptr, pages[used], last, table.page_size)


def pages_on_device(kv_lens, page_size: int, num_pages: int) -> tuple:
    """The pages of requests of ``kv_lens`` tokens, a torch tensor, in lists of ``num_pages`` entries together; nothing waits.

    Returns ``indptr`` and ``last_page_len``, int32, then the request of each entry and its number among the pages of that request.
    Entries after the last page belong to the last request.
    """
    torch = _torch()
    counts = -(-kv_lens.int() // page_size)
    indptr = torch.zeros(len(kv_lens) + 1, dtype=torch.int32, device=kv_lens.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    entries = torch.arange(num_pages, dtype=torch.int32, device=kv_lens.device)
    request = torch.searchsorted(indptr[1:-1], entries, right=True)
    return indptr, kv_lens.int() - (counts - 1) * page_size, request, entries - indptr[request]


def page_bounds(kv_lens, page_size: int) -> tuple:
    """``indptr`` and ``last_page_len`` of the pages of requests of ``kv_lens`` tokens, int32 of NumPy."""
    import numpy

    counts = -(-kv_lens // page_size)
    indptr = numpy.zeros(len(kv_lens) + 1, dtype=numpy.int32)
    numpy.cumsum(counts, out=indptr[1:])
    return indptr, numpy.where(counts > 0, kv_lens - (counts - 1) * page_size, 0).astype(numpy.int32)
