/* libjpeg's errors, and limits. It calls `fail` or `complain`; both go back to core_guarded. */
#include "jpeg.h"

#define TEXT(token) #token
#define TEXT_OF(macro) TEXT(macro)

const char core_libjpeg[] = "libjpeg-turbo " TEXT_OF(LIBJPEG_TURBO_VERSION);

static void fail(j_common_ptr common)
{
    struct failure *failure = (struct failure *)common->err;
    failure->handlers.format_message(common, failure->words);
    longjmp(failure->back, 1);
}

static void complain(j_common_ptr common, int level)
{
    if (level < 0) /* a warning: damaged data; above are traces */
        fail(common);
}

static void silent(j_common_ptr common)
{
    (void)common;
}

struct jpeg_error_mgr *core_handlers(struct failure *failure)
{
    jpeg_std_error(&failure->handlers);
    failure->handlers.error_exit = fail;
    failure->handlers.emit_message = complain;
    failure->handlers.output_message = silent;
    failure->words[0] = 0;
    return &failure->handlers;
}

bool core_guarded(struct failure *failure, void (*work)(void *), void *job)
{
    if (setjmp(failure->back))
        return false;
    work(job);
    return true;
}

/* A progressive file has some ten scans, and each is a pass over all coefficients: a small one with
 * thousands would take hours. */
#define MAX_SCANS 200

void core_watch(j_common_ptr common)
{
    struct failure *failure = (struct failure *)common->err;
    j_decompress_ptr in = (j_decompress_ptr)common;
    if (in->input_scan_number > MAX_SCANS) {
        snprintf(failure->words, sizeof failure->words, "more than %d scans", MAX_SCANS);
        longjmp(failure->back, 1);
    }
}

bool core_unfinished(const struct jpeg_decompress_struct *in)
{
    for (int i = 0; in->coef_bits && i < 64 * in->num_components; i++)
        if (in->coef_bits[i / 64][i % 64])
            return true;
    return false;
}
