/* Fills one input of a slot that a Python program has handed over.
 *
 *     fill_slot REFERENCE TENSOR [SIZE ...] < bytes
 *
 * REFERENCE is str(lease.detach()), such as shmlane.0123456789abcdef:0:1. The bytes of
 * the tensor come from standard input; SIZE ... is its shape, where it is to have
 * another than it has. Prints the reference under which the slot can be adopted now.
 *
 * On any error it says why and ends with 1. If it had begun to fill the slot, that goes
 * back to its home, and REFERENCE is of no use any more.
 *
 * Uses nothing but libc. docs/region-format.md tells what the numbers below mean.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    VERSION = 2,
    HEADER_BYTES = 80,
    ROW_BYTES = 64,
    HEAD_BYTES = 64,
    ENTRY_BYTES = 48,
    NO_SHAPE = 255,
};
enum state { AT_HOME, HANDED, ADOPTED, RETURNED };

static const uint64_t FIRST_LOCK = UINT64_C(1) << 48;

/* A region file, open and mapped. */
struct region {
    int fd;
    uint8_t *bytes;
    uint64_t size;
};

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    /* The kernel lets go of the locks. */
    exit(1);
}

/* The machine must be little-endian, as all that Triton runs on are. */
static uint64_t get(const uint8_t *at, size_t width) {
    uint64_t value = 0;
    memcpy(&value, at, width);
    return value;
}

static void put(uint8_t *at, uint64_t value, size_t width) {
    memcpy(at, &value, width);
}

/* The bytes from `start` on, if `count` of them lie in the region. */
static uint8_t *part(const struct region *region, uint64_t start, uint64_t count) {
    if (start > region->size || count > region->size - start)
        fail("the header points beyond the end of the region");
    return region->bytes + start;
}

static struct region open_region(const char *name) {
    struct region region;
    struct stat facts;
    char path[64];
    if (strlen(name) != 24 || strncmp(name, "shmlane.", 8) != 0 || strchr(name, '/'))
        fail("%s is not the name of a region", name);
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    region.fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (region.fd < 0)
        fail("cannot open %s: %s", path, strerror(errno));
    /* Says that the region is in use, so that nobody removes it; and then whether
     * somebody had removed it before. */
    if (flock(region.fd, LOCK_SH) != 0 || fstat(region.fd, &facts) != 0)
        fail("cannot lock %s: %s", path, strerror(errno));
    if (facts.st_nlink == 0)
        fail("%s was removed", path);
    region.size = (uint64_t)facts.st_size;
    region.bytes =
        mmap(NULL, region.size, PROT_READ | PROT_WRITE, MAP_SHARED, region.fd, 0);
    if (region.bytes == MAP_FAILED)
        fail("cannot map %s: %s", path, strerror(errno));
    return region;
}

/* Take the lock of who borrows the slot; the kernel gives it back at the end. */
static void borrow(const struct region *region, uint64_t slot) {
    struct flock lock = {
        .l_type = F_WRLCK,
        .l_whence = SEEK_SET,
        .l_start = (off_t)(FIRST_LOCK + 2 * slot + 1),
        .l_len = 1,
    };
    if (fcntl(region->fd, F_OFD_SETLK, &lock) != 0)
        fail("another process has adopted the slot");
}

/* The number of the tensor among those of a slot, and its row in the table. */
static uint64_t find_tensor(const struct region *region, const char *name,
                            uint8_t **row) {
    uint64_t table = get(region->bytes + 64, 8), count = get(region->bytes + 72, 4);
    for (uint64_t number = 0; number < count; number++) {
        *row = part(region, table + number * ROW_BYTES, ROW_BYTES);
        uint64_t length = get(*row + 24, 4);
        const uint8_t *text = part(region, get(*row + 16, 8), length);
        if (length == strlen(name) && memcmp(text, name, length) == 0)
            return number;
    }
    fail("there is no tensor %s", name);
    return 0;
}

static uint64_t bytes_of_element(const uint8_t *row) {
    const char *type = (const char *)row + 32;
    if (memchr(type, '\0', 8) == NULL || strcmp(type, "BYTES") == 0)
        fail("elements of this datatype have no fixed size");
    if (strcmp(type, "BOOL") == 0)
        return 1;
    if (strcmp(type, "BF16") == 0)
        return 2;
    /* FP32, INT8, UINT16 and so on: the number is that of bits. */
    return strtoull(type + strcspn(type, "0123456789"), NULL, 10) / 8;
}

/* Write the shape into the entry, and return the bytes that such a tensor has. */
static uint64_t reshape(uint8_t *entry, uint64_t entry_stride, uint64_t element,
                        char **sizes, int count) {
    uint64_t total = element;
    if ((uint64_t)count > (entry_stride - ENTRY_BYTES) / 8)
        fail("no tensor here has %d dimensions", count);
    for (int index = 0; index < count; index++) {
        uint64_t size = strtoull(sizes[index], NULL, 10);
        if (size == 0 || total > UINT64_MAX / size)
            fail("a dimension cannot be %s", sizes[index]);
        total *= size;
        put(entry + ENTRY_BYTES + 8 * index, size, 8);
    }
    put(entry, total, 8);
    put(entry + 46, (uint64_t)count, 1);
    return total;
}

int main(int argc, char **argv) {
    char name[32];
    uint64_t slot, generation;
    int end = 0;
    if (argc < 3)
        fail("usage: fill_slot REFERENCE TENSOR [SIZE ...] < bytes");
    int found = sscanf(argv[1], "%31[^:]:%" SCNu64 ":%" SCNu64 "%n", name, &slot,
                       &generation, &end);
    if (found != 3 || argv[1][end] != '\0')
        fail("%s is no reference to a slot", argv[1]);

    /* What the header says is not believed before it has been checked. */
    struct region region = open_region(name);
    if (region.size < HEADER_BYTES || memcmp(region.bytes, "shmlane", 8) != 0)
        fail("%s is not a region", name);
    if (get(region.bytes + 8, 4) != VERSION)
        fail("this region has version %" PRIu64 ", known is %d",
             get(region.bytes + 8, 4), VERSION);
    if (slot >= get(region.bytes + 12, 4))
        fail("the region has no slot %" PRIu64, slot);
    uint8_t *row;
    uint64_t number = find_tensor(&region, argv[2], &row);
    if (get(row + 28, 4) != 0)
        fail("%s is an output", argv[2]);
    uint64_t record_stride = get(region.bytes + 56, 4);
    uint64_t entry_stride = get(region.bytes + 60, 4);
    if (entry_stride < ENTRY_BYTES
        || HEAD_BYTES + (number + 1) * entry_stride > record_stride)
        fail("the header contradicts itself");
    uint64_t records = get(region.bytes + 16, 8);
    uint8_t *record = part(&region, records + slot * record_stride, record_stride);
    uint8_t *entry = record + HEAD_BYTES + number * entry_stride;

    borrow(&region, slot);
    if (record[1] != HANDED || get(record + 8, 8) != generation)
        fail("the slot was adopted before, or taken back: %s is of no use", argv[1]);
    put(record + 36, (uint64_t)getpid(), 4);
    record[1] = ADOPTED;

    /* The tensor may have moved to a file of its own. */
    struct region block = region;
    if (get(entry + 24, 8) != 0) {
        char moved[32];
        snprintf(moved, sizeof moved, "shmlane.%016" PRIx64, get(entry + 24, 8));
        block = open_region(moved);
    }
    uint64_t capacity = get(entry + 16, 8), nbytes = get(entry, 8);
    uint8_t *tensor = part(&block, get(entry + 8, 8), capacity);
    entry[45] = 0;
    if (argc > 3)
        nbytes = reshape(entry, entry_stride, bytes_of_element(row), argv + 3,
                         argc - 3);
    else if (entry[46] == NO_SHAPE)
        fail("%s has no shape yet: give its sizes after its name, as in"
             " fill_slot REFERENCE %s 1 3 640 640", argv[2], argv[2]);
    if (nbytes > capacity)
        fail("%" PRIu64 " bytes do not fit the block of %" PRIu64, nbytes, capacity);
    uint64_t given = fread(tensor, 1, nbytes, stdin);
    /* Of an endless stream no more is counted than shows that it is too much. */
    bool is_more = given == nbytes && fgetc(stdin) != EOF;
    if (given != nbytes || is_more)
        fail("%s has %" PRIu64 " bytes, given were %s%" PRIu64, argv[2], nbytes,
             is_more ? "more than " : "", given);
    entry[45] = 1;

    /* Handed on: first all that was written, then the byte that says so. */
    put(record + 8, generation + 1, 8);
    atomic_thread_fence(memory_order_release);
    record[1] = HANDED;
    printf("%s:%" PRIu64 ":%" PRIu64 "\n", name, slot, generation + 1);
    return 0;
}
